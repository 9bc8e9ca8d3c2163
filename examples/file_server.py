"""Serves a file by RDMA reads, through a memory window that it revokes afterwards.

    python file_server.py serve some.iso
    python file_server.py fetch 192.0.2.1 --output copy.iso

The conversation:

    client  connects and sends an empty message, the request
    server  binds a window over the file that only this client's queue pair may read, and sends the window's
            descriptor (20 bytes: address, length, token) and the SHA-256 of the file
    client  reads the file through the window, checks the SHA-256, and sends an empty message
    server  invalidates the window and sends an empty message
    client  tries to read again and is refused

The server's processor does no work for the transfer. Some adapters have no windows, for example siw. There the
server registers a region for this client, sends the region's token, and deregisters the region to revoke it.
"""

import argparse
import hashlib
import mmap
import sys
from contextlib import ExitStack
from pathlib import Path

import ndpy

PORT = 7472
CHUNK = 1 << 18
READS_AT_ONCE = 8
HASH_LENGTH = hashlib.sha256().digest_size
OFFER_LENGTH = 20 + HASH_LENGTH


def finish(queue, operation, timeout_s):
    """Wait for the oldest outstanding request of this queue. Raise if it failed."""
    (completion,) = queue.wait(timeout_s, 1)
    completion.raise_for_status()
    assert completion.operation is operation


def serve_client(adapter, connector, file, digest, timeout_s):
    """Serve one client, from its connection request to the end of its connection."""
    with ExitStack() as stack:
        offer = bytearray(OFFER_LENGTH)
        offer_region = stack.enter_context(adapter.register(offer, ndpy.Access.NONE))
        received = stack.enter_context(adapter.create_completion_queue(4))
        sent = stack.enter_context(adapter.create_completion_queue(4))
        queue_pair = stack.enter_context(adapter.create_queue_pair(received, sent, receive_queue_depth=2))
        for _ in range(2):
            queue_pair.receive([])
        connector.accept(queue_pair, timeout_s=timeout_s)
        finish(received, ndpy.Operation.RECEIVE, timeout_s)

        with_window = ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities
        if with_window:
            # The region has no remote rights, so the client can only use the window.
            region = stack.enter_context(adapter.register(file, ndpy.Access.NONE))
            window = stack.enter_context(adapter.create_memory_window())
            queue_pair.bind(window, region, access=ndpy.Access.REMOTE_READ)
            finish(sent, ndpy.Operation.BIND, timeout_s)
            remote = window.remote()
        else:
            region = stack.enter_context(adapter.register(file, ndpy.Access.REMOTE_READ))
            remote = region.remote()
        offer[:] = remote.to_bytes() + digest
        queue_pair.send(offer_region)
        finish(sent, ndpy.Operation.SEND, timeout_s)

        finish(received, ndpy.Operation.RECEIVE, timeout_s)
        if with_window:
            queue_pair.invalidate(window)
            finish(sent, ndpy.Operation.INVALIDATE, timeout_s)
        else:
            region.deregister(timeout_s=timeout_s)
        queue_pair.send([])
        # The client's next read is refused, which ends the connection. That may happen before this send completes.
        connector.wait_disconnected(timeout_s)
    return "window invalidated" if with_window else "no windows on this adapter: region deregistered"


def run_server(adapter, args):
    with open(args.file, "rb") as source, ExitStack() as stack:
        # The mapping is private, because the kernel pins memory for windows as writable, which it refuses for pages
        # that are shared with the file.
        try:
            file = mmap.mmap(source.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:
            sys.exit(f"file_server: {args.file} is empty")
        digest = hashlib.sha256(file).digest()
        listener = stack.enter_context(adapter.listen(("", args.port)))
        host, port = listener.address[:2]
        print(f"serving {args.file} ({len(file)} bytes), listening on {host} port {port}", flush=True)
        while True:
            connector = listener.get_request()  # waits for ever; Ctrl-C ends it
            peer = connector.peer_address[0]
            try:
                with connector:
                    outcome = serve_client(adapter, connector, file, digest, args.timeout)
                print(f"served {peer}; {outcome}", flush=True)
            except ndpy.ProviderError as error:
                print(f"client {peer} failed: {error}", file=sys.stderr, flush=True)
            if args.once:
                return


def read_all(queue_pair, queue, region, remote, timeout_s):
    """Read all of `remote` into `region`, in chunks, a few at a time."""
    posted = done = 0
    while done < remote.length:
        while posted < remote.length and posted - done < READS_AT_ONCE * CHUNK:
            end = min(posted + CHUNK, remote.length)
            queue_pair.read(region[posted:end], remote[posted:end])
            posted = end
        for completion in queue.wait(timeout_s):
            completion.raise_for_status()
            done = min(done + CHUNK, remote.length)  # reads complete in the order in which they were posted


def run_client(adapter, args):
    with ExitStack() as stack:
        offer = bytearray(OFFER_LENGTH)
        offer_region = stack.enter_context(adapter.register(offer, ndpy.Access.LOCAL_WRITE))
        received = stack.enter_context(adapter.create_completion_queue(4))
        sent = stack.enter_context(adapter.create_completion_queue(2 * READS_AT_ONCE))
        queue_pair = stack.enter_context(
            adapter.create_queue_pair(received, sent, receive_queue_depth=2, initiator_queue_depth=READS_AT_ONCE)
        )
        queue_pair.receive(offer_region)
        queue_pair.receive([])
        connector = stack.enter_context(adapter.connect(queue_pair, (args.host, args.port), timeout_s=args.timeout))
        queue_pair.send([])
        finish(sent, ndpy.Operation.SEND, args.timeout)
        finish(received, ndpy.Operation.RECEIVE, args.timeout)
        remote = ndpy.RemoteMemory.from_bytes(offer[:20])

        data = ndpy.alloc(remote.length)
        # iWARP needs READ_SINK: there the answer to a read is a write to this memory.
        sink = stack.enter_context(adapter.register(data, ndpy.Access.LOCAL_WRITE | ndpy.Access.READ_SINK))
        read_all(queue_pair, sent, sink, remote, args.timeout)
        digest = hashlib.sha256(data).digest()
        if digest != offer[20:]:
            sys.exit("file_server: the file arrived damaged: its SHA-256 is not what the server said")
        if args.output:
            args.output.write_bytes(data)
        print(f"read {remote.length} bytes, SHA-256 verified: {digest.hex()}")

        queue_pair.send([])
        finish(sent, ndpy.Operation.SEND, args.timeout)
        finish(received, ndpy.Operation.RECEIVE, args.timeout)
        queue_pair.read(sink[0:1], remote[0:1])
        (completion,) = sent.wait(args.timeout)
        if completion.ok:
            sys.exit("file_server: the file could be read although the server had revoked the right")
        print(f"read after revocation refused: {completion.status.name}")
        connector.disconnect(timeout_s=args.timeout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("serve", parents=[common], help="serve a file until Ctrl-C")
    server.add_argument("file", type=Path)
    server.add_argument("--once", action="store_true", help="stop after one client")
    client = roles.add_parser("fetch", parents=[common], help="read the file from a server")
    client.add_argument("host")
    client.add_argument("--output", type=Path, help="write the data to this file")
    args = parser.parse_args()
    with ndpy.open_adapter(args.adapter) as adapter:
        (run_server if args.role == "serve" else run_client)(adapter, args)


if __name__ == "__main__":
    try:
        main()
    except (ndpy.NdpyError, OSError) as error:
        sys.exit(f"file_server: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
