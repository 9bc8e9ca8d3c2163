"""Peers that die, refuse, or never answer. ndpy reports an error within a stated time. Nothing hangs or is left."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from kit.helpers import (
    DEADLINE_S,
    create_end,
    has_kernel_driver,
    host_of,
    kernel_resources,
    memory,
    require,
    require_acknowledged_sends,
    statuses,
    take,
    wait_until,
)
from kit.processes import Process, start_python

import ndpy
from ndpy import Access, Operation, RemoteMemory, Status

# A program may rely on this: the peer's kernel reports its end, without any timeout of the transport.
NOTICE_S = 30.0
# siw gives up a connection attempt after ten seconds, and a killed process cannot end before that.
END_S = 40.0


@pytest.fixture
def start(adapter):
    """start(role, *arguments) starts peer.py on the adapter under test."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def start_peer(role: str, *arguments: object) -> Process:
        script = Path(__file__).parent / "peer.py"
        return start_python(script, role, adapter.info.name, *map(str, arguments))

    return start_peer


def address_of(server: Process) -> tuple[str, int]:
    found = server.wait_for(r"listening on (\S+) port (\d+)")
    return found[1], int(found[2])


def kill(process: Process) -> None:
    """kill -9 by process ID."""
    process.popen.kill()
    assert process.finish(END_S).status == -9


def test_a_server_killed_in_mid_transfer(adapter, keep, start):
    """The oldest request fails and all others are cancelled, each exactly once (F.6.6)."""
    of_receive = 1 << 40
    local = memory(keep, adapter, 65536, Access.LOCAL_WRITE | Access.READ_SINK)
    end = create_end(keep, adapter)
    with start("serve") as server:
        connector = keep(adapter.connect(end.queue_pair, address_of(server), timeout_s=DEADLINE_S))
        remote = RemoteMemory.from_bytes(connector.private_data[:20])
        end.queue_pair.receive(local, context=of_receive)
        posted = ended = 0
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            try:
                (end.queue_pair.read if posted % 4 == 3 else end.queue_pair.write)(local, remote, context=posted)
                posted += 1
            except ndpy.QueueFullError:
                for completion in end.cq.wait(DEADLINE_S):
                    completion.raise_for_status()
                    assert completion.context == ended
                    ended += 1
        kill(server)
    begin = time.monotonic()
    connector.wait_disconnected(NOTICE_S)
    rest = take(end.cq, posted - ended + 1, 2 * DEADLINE_S)
    assert time.monotonic() - begin < 2 * DEADLINE_S
    assert sorted(completion.context for completion in rest) == [*range(ended, posted), of_receive]
    failed = [completion for completion in rest if not completion.ok]
    assert failed
    assert {completion.status for completion in failed[1:]} <= {Status.CANCELED}
    assert failed[0].status in (Status.IO_TIMEOUT, Status.CANCELED)
    end.queue_pair.send([], context=5)
    assert statuses(take(end.cq)) == [Status.CANCELED]


def test_a_client_killed_in_mid_transfer(adapter, keep, start):
    """The server's receives are cancelled and the notification comes. Afterwards another client is served."""
    listener = keep(adapter.listen((host_of(adapter), 0)))
    for _ in range(2):
        end = create_end(keep, adapter)
        inbox = memory(keep, adapter, 4096)
        for context in range(16):
            end.queue_pair.receive(inbox, context=context)
        with start("flood", *listener.address[:2]) as client:
            connector = keep(listener.get_request(3 * DEADLINE_S))
            connector.accept(end.queue_pair, timeout_s=DEADLINE_S)
            taken = 0
            while taken < 100:
                for completion in end.cq.wait(DEADLINE_S):
                    completion.raise_for_status()
                    if completion.operation is Operation.RECEIVE:
                        end.queue_pair.receive(inbox, context=completion.context)
                        taken += 1
                        if taken % 8 == 0:
                            end.queue_pair.send([])
            kill(client)
        begin = time.monotonic()
        connector.wait_disconnected(NOTICE_S)
        cancelled = 0
        while cancelled < 16:
            for completion in take(end.cq):
                if completion.operation is not Operation.RECEIVE:
                    continue
                if completion.ok:
                    end.queue_pair.receive(inbox, context=completion.context)
                else:
                    assert completion.status is Status.CANCELED
                    cancelled += 1
        assert time.monotonic() - begin < 2 * NOTICE_S


def test_a_client_killed_between_offer_and_completion(adapter, keep, start):
    listener = keep(adapter.listen((host_of(adapter), 0)))
    end = create_end(keep, adapter)
    with start("hesitate", *listener.address[:2]) as client:
        connector = keep(listener.get_request(3 * DEADLINE_S))
        accepting = connector.begin_accept(end.queue_pair)
        client.wait_for("offered")
        kill(client)
    if ndpy.Capability.REFUSE_OFFER in adapter.info.capabilities:
        with pytest.raises((ndpy.ConnectionRefusedError, ndpy.ConnectionAbortedError)):
            accepting.result(NOTICE_S)
    else:
        accepting.result(NOTICE_S)
        connector.wait_disconnected(NOTICE_S)


def test_a_client_killed_before_the_accept(adapter, keep, start):
    listener = keep(adapter.listen((host_of(adapter), 0)))
    end = create_end(keep, adapter)
    with start("hesitate", *listener.address[:2]) as client:
        connector = keep(listener.get_request(3 * DEADLINE_S))
        client.wait_for("asked")
        kill(client)
    begin = time.monotonic()
    with pytest.raises((ndpy.ConnectionRefusedError, ndpy.ConnectionAbortedError, ndpy.TimeoutError)):
        connector.accept(end.queue_pair, timeout_s=NOTICE_S)
        # On iWARP the server's side may be established before it hears that the client has gone.
        connector.wait_disconnected(NOTICE_S)
        raise ndpy.ConnectionAbortedError("the connection has ended")
    assert time.monotonic() - begin < 2 * NOTICE_S


def test_a_server_killed_with_a_request_pending(adapter, keep, start):
    """The server's kernel refuses the request."""
    end = create_end(keep, adapter)
    with start("ignore") as server:
        connector = keep(adapter.create_connector())
        connecting = connector.begin_connect(end.queue_pair, address_of(server))
        server.wait_for("asked")
        kill(server)
    with pytest.raises((ndpy.ConnectionRefusedError, ndpy.ConnectionAbortedError)):
        connecting.result(NOTICE_S)
    assert end.cq.poll() == []


def test_a_server_that_never_answers(adapter, keep, start):
    """The client's deadline holds, and giving up is clean on both sides."""
    end = create_end(keep, adapter)
    with start("ignore") as server:
        connector = keep(adapter.create_connector())
        address = address_of(server)
        begin = time.monotonic()
        with pytest.raises(ndpy.TimeoutError):
            connector.connect(end.queue_pair, address, timeout_s=1.0)
        assert 1.0 <= time.monotonic() - begin < DEADLINE_S
        connector.close()
        server.wait_for("asked")


def test_a_process_killed_with_everything_open_ends_at_once(adapter, start):
    """It has a window bound too. rxe hangs for 51 s, and warns, if a queue pair is destroyed before its window."""
    with start("hold") as process:
        process.wait_for("ready")
        pid = process.popen.pid
        assert not has_kernel_driver(adapter) or kernel_resources(pid)["qp"] == 2
        begin = time.monotonic()
        kill(process)
        assert time.monotonic() - begin < DEADLINE_S
    wait_until(lambda: not any(kernel_resources(pid).values()), "the kernel has released everything", NOTICE_S)


def test_ctrl_c_ends_every_wait(start):
    kinds = ("completion queue", "poller", "poller without deadline", "listener", "pending", "connect")
    with start("wait") as process:
        for kind in kinds:
            process.wait_for(f"waiting {kind}\n")
            time.sleep(0.3)
            begin = time.monotonic()
            process.interrupt()
            process.wait_for(f"interrupted {kind}\n", NOTICE_S)
            assert time.monotonic() - begin < DEADLINE_S
        process.wait_for("still works")
        process.succeed()


def test_a_queue_that_nobody_receives_on_times_out_between_processes(adapter, keep, start):
    """The serving peer posts 32 receives and takes messages as they come. Many more than 32 arrive."""
    require_acknowledged_sends(adapter)
    end = create_end(keep, adapter)
    outbox = memory(keep, adapter, 64)
    with start("serve") as server:
        keep(adapter.connect(end.queue_pair, address_of(server), timeout_s=DEADLINE_S))
        for _ in range(8):
            for _ in range(16):
                end.queue_pair.send(outbox)
            for completion in take(end.cq, 16):
                completion.raise_for_status()
