"""One end of a conversation between two processes: python peer_of_a_version.py VERSION serve|connect [PORT [take back]]

The server exposes memory through a window. The client writes through a slice of the window, reads the bytes back, and
sends a last message. With "take back" that message also invalidates the window. Each side prints what it saw.
"""

import sys

from kit.deadlines import DEADLINE_S

import ndpy
from ndpy import Access, RemoteMemory


def take(cq: ndpy.CompletionQueue) -> ndpy.Completion:
    (completion,) = cq.wait(DEADLINE_S, 1)
    completion.raise_for_status()
    return completion


def main() -> None:
    version, role = int(sys.argv[1]), sys.argv[2]
    with ndpy.open_adapter("127.0.0.1", version=version) as adapter:
        assert adapter.info.version == version
        cq = adapter.create_completion_queue(16)
        inbox = adapter.register(bytearray(64))
        queue_pair = adapter.create_queue_pair(cq)
        queue_pair.receive(inbox)
        if role == "serve":
            made = serve(adapter, cq, inbox, queue_pair)
        else:
            made = use(adapter, cq, inbox, queue_pair, int(sys.argv[3]))
        for resource in (*made, queue_pair, cq, inbox):
            resource.close()


def serve(adapter, cq, inbox, queue_pair):
    with adapter.listen(("127.0.0.1", 0)) as listener:
        print("port", listener.address[1], flush=True)
        connector = listener.get_request(DEADLINE_S)
    assert connector.private_data == b"client of the window"
    connector.accept(queue_pair, private_data=b"server of the window", timeout_s=DEADLINE_S)
    # On iWARP the client must send first.
    take(cq)
    memory = adapter.register(bytearray(b"memory of the server".ljust(4096, b".")))
    window = adapter.create_memory_window()
    queue_pair.receive(inbox)
    queue_pair.bind(window, memory[0:4096], Access.REMOTE_READ | Access.REMOTE_WRITE)
    announcement = adapter.register(window.remote().to_bytes(), Access.NONE)
    queue_pair.send(announcement)
    for _ in range(3):
        completion = take(cq)
    assert completion.operation is ndpy.Operation.RECEIVE
    print("told", bytes(inbox.buffer)[: completion.nbytes].decode(), flush=True)
    print("holds", bytes(memory.buffer)[1000:1020].decode(), flush=True)
    print("bound", window.is_bound, flush=True)
    connector.wait_disconnected(DEADLINE_S)
    return connector, window, announcement, memory


def use(adapter, cq, inbox, queue_pair, port):
    connector = adapter.create_connector()
    connector.connect(queue_pair, ("127.0.0.1", port), private_data=b"client of the window", timeout_s=DEADLINE_S)
    assert connector.private_data == b"server of the window"
    connector.complete_connect(DEADLINE_S)
    local = adapter.register(bytearray(b"written by a client.".ljust(64, b"_")))
    queue_pair.send(local[0:1])
    take(cq)
    received = take(cq)
    assert received.operation is ndpy.Operation.RECEIVE
    remote = RemoteMemory.from_bytes(bytes(inbox.buffer)[:20])
    queue_pair.read(local[20:40], remote[0:20])
    take(cq)
    print("read", bytes(local.buffer)[20:40].decode(), flush=True)
    queue_pair.write(local[0:20], remote[500:2000][500:520])
    queue_pair.read(local[40:60], remote[1000:1020])
    for _ in range(2):
        take(cq)
    print("back", bytes(local.buffer)[40:60].decode(), flush=True)
    last = adapter.register(b"that was all", Access.NONE)
    if len(sys.argv) > 4:
        queue_pair.send_and_invalidate(last, remote)
    else:
        queue_pair.send(last)
    take(cq)
    connector.disconnect(DEADLINE_S)
    return connector, local, last


main()
