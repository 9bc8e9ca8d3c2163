"""A program whose link or device goes away. It runs in a process of its own, on a link of its own.

python on_a_link.py removal|removal_in_a_scenario|second_removal|port ADAPTER NETDEV
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kit.helpers import (
    DEADLINE_S,
    Keeper,
    Pair,
    assert_works,
    connect_pair,
    create_end,
    host_of,
    memory,
    take,
    wait_until,
)
from kit.threads import Elsewhere

import ndpy
from ndpy import Access, EventKind, Status
from ndpy.faults import Fault, Scenario
from ndpy.faults.injection import Injection, load_shim

# How long the news of a removal may take to reach every object.
NOTICE_S = 30.0


def say(*words: object) -> None:
    print(*words, flush=True)


def expect_removed(what: str, call) -> None:
    """The call raises DeviceRemovedError within NOTICE_S."""
    begin = time.monotonic()
    try:
        result = call()
    except ndpy.DeviceRemovedError as error:
        assert time.monotonic() - begin < NOTICE_S, what
        assert "removed" in str(error)
        return
    except BaseException as error:
        raise AssertionError(f"{what}: {error!r}") from error
    raise AssertionError(f"{what}: returned {result!r}")


def expect_event(events: ndpy.EventStream, kind: EventKind) -> None:
    """The event of port 1 comes, perhaps behind others."""
    deadline = time.monotonic() + NOTICE_S
    while (event := events.get(deadline - time.monotonic())).kind is not kind:
        say("another event:", event.name)
    assert event.port == 1, event


def removal(name: str, netdev: str) -> None:
    """The device is removed while everything is in use."""
    keep = Keeper()
    adapter = ndpy.open_adapter(name)
    pair: Pair = connect_pair(keep, adapter)
    region = memory(keep, adapter, 4096, Access.REMOTE_WRITE)
    element = region[0:8]
    remote = region.remote()
    idle = create_end(keep, adapter)
    idle.queue_pair.receive(region)
    pair.server.queue_pair.receive(region)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    connector = keep(adapter.create_connector())
    silent = keep(adapter.create_connector())
    connecting = silent.begin_connect(create_end(keep, adapter).queue_pair, listener.address)
    requested = keep(listener.get_request(DEADLINE_S))
    asked = listener.begin_get_request()
    armed = idle.cq.arm()
    left = pair.client.connector.begin_wait_disconnected()
    poller = keep(ndpy.Poller())
    poller.add(idle.cq)
    window = (
        keep(adapter.create_memory_window()) if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities else None
    )
    if window is not None:
        pair.server.queue_pair.bind(window, region)
        take(pair.server.cq)[0].raise_for_status()
    shared = (
        keep(adapter.create_shared_receive_queue(8))
        if ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities
        else None
    )

    datagrams = there = None
    if ndpy.Capability.DATAGRAMS in adapter.info.capabilities:
        datagrams = keep(adapter.create_datagram_queue_pair(idle.cq))
        datagrams.receive(region)
        there = keep(datagrams.destination(datagrams.local_endpoint()))
    events = keep(adapter.events())
    listening = Elsewhere(lambda: list(events)).start()
    waiter = Elsewhere(lambda: idle.cq.wait(DEADLINE_S)).start()
    time.sleep(0.2)
    say("ready")
    begin = time.monotonic()
    delete = subprocess.Popen(["rdma", "link", "delete", name])

    for what, pending in {"connect": connecting, "get_request": asked, "arm": armed, "wait_disconnected": left}.items():
        expect_removed(what, lambda pending=pending: pending.result(DEADLINE_S))
    assert type(ended := waiter.outcome()) is ndpy.DeviceRemovedError, ended
    told = listening.result()
    assert [event.kind for event in told][-1] is EventKind.DEVICE_FATAL, told
    calls = {
        "register": lambda: adapter.register(bytearray(8)),
        "begin_register": lambda: adapter.begin_register(bytearray(8)),
        "create_completion_queue": lambda: adapter.create_completion_queue(8),
        "create_queue_pair": lambda: adapter.create_queue_pair(idle.cq),
        "create_connector": adapter.create_connector,
        "listen": lambda: adapter.listen(("", 0)),
        "send": lambda: pair.client.queue_pair.send(element),
        "send of several": lambda: pair.client.queue_pair.send([element]),
        "receive": lambda: pair.client.queue_pair.receive(element),
        "read": lambda: pair.client.queue_pair.read(element, remote),
        "write": lambda: pair.client.queue_pair.write(element, remote),
        "flush": pair.client.queue_pair.flush,
        "poll": idle.cq.poll,
        "wait": lambda: idle.cq.wait(DEADLINE_S),
        "arm again": idle.cq.arm,
        "resize": lambda: idle.cq.resize(128),
        "remote": region.remote,
        "disconnect": lambda: pair.client.connector.disconnect(DEADLINE_S),
        "accept": lambda: requested.begin_accept(idle.queue_pair),
        "reject": requested.reject,
        "bind address": lambda: connector.bind((host_of(adapter), 0)),
        "connect again": lambda: connector.connect(idle.queue_pair, (host_of(adapter), 7000), timeout_s=DEADLINE_S),
        "get_request": listener.begin_get_request,
    }
    if window is not None:
        calls["bind"] = lambda: pair.server.queue_pair.bind(window, region)
        calls["invalidate"] = lambda: pair.server.queue_pair.invalidate(window)
        calls["window"] = window.remote
    calls["events"] = adapter.events
    calls["event"] = lambda: events.get(0)
    if datagrams is not None:
        calls["datagram"] = lambda: datagrams.send(element, there)
        calls["destination"] = lambda: datagrams.destination(datagrams.local_endpoint())
        calls["datagram queue pair"] = lambda: adapter.create_datagram_queue_pair(idle.cq)
    if shared is not None:
        calls["shared receive"] = lambda: shared.receive([])
        calls["shared modify"] = lambda: shared.modify(4)
        calls["shared arm"] = shared.arm
    for what, call in calls.items():
        expect_removed(what, call)
    say(f"every object knows after {time.monotonic() - begin:.1f} s")
    begin = time.monotonic()
    keep.close()
    adapter.close()
    assert delete.wait(DEADLINE_S) == 0
    say(f"closed, and deleted {time.monotonic() - begin:.1f} s later")
    assert name not in [info.name for info in ndpy.list_adapters()]
    try:
        ndpy.open_adapter(name)
    except ndpy.AdapterNotFoundError:
        say("gone")


def removal_in_a_scenario(name: str, netdev: str) -> None:
    """The same while the shim could remove it, too."""
    load_shim()
    with Injection(Scenario([Fault("remove", nth=1_000_000)]), "shim") as injection:
        injection.begin()
        removal(name, netdev)


def second_removal(name: str, netdev: str) -> None:
    """A scenario removes the device first. Then the device is removed, and after that everything is closed."""
    keep = Keeper()
    load_shim()
    with Injection(Scenario([Fault("remove", nth=3)]), "shim") as injection:
        injection.begin()
        adapter = ndpy.open_adapter(name)
        pair: Pair = connect_pair(keep, adapter)
        region = memory(keep, adapter, 64)
        with contextlib.suppress(ndpy.NdpyError):
            for _ in range(5):
                pair.server.queue_pair.receive(region)

        def wait() -> None:
            """What was outstanding comes first."""
            while True:
                pair.server.cq.wait(DEADLINE_S)

        expect_removed("wait", wait)
        injection.report().check()
        say("ready")
        delete = subprocess.Popen(["rdma", "link", "delete", name])
        time.sleep(1)
        keep.close()
        adapter.close()
        assert delete.wait(DEADLINE_S) == 0
    assert name not in [info.name for info in ndpy.list_adapters()]
    say("gone")


def port(name: str, netdev: str) -> None:
    """The port goes down and comes up while a connection is in use."""
    keep = Keeper()
    with ndpy.open_adapter(name) as adapter:
        pair = connect_pair(keep, adapter)
        assert_works(keep, pair)
        assert adapter.port_state == "active"
        events = keep(adapter.events())
        subprocess.run(["ip", "link", "set", netdev, "down"], check=True, timeout=DEADLINE_S)
        begin = time.monotonic()
        wait_until(lambda: adapter.port_state == "down", "the event arrives", NOTICE_S)
        say(f"down after {time.monotonic() - begin:.1f} s")
        expect_event(events, EventKind.PORT_DOWN)
        assert next(info.state for info in ndpy.list_adapters() if info.name == name) == "down"
        # The driver decides whether messages to oneself still arrive. In any case each posted request must end.
        pair.server.queue_pair.receive(memory(keep, adapter, 8), context=1)
        pair.client.queue_pair.send(memory(keep, adapter, b"message!"), context=2)
        (completion,) = take(pair.client.cq, timeout_s=2 * DEADLINE_S)
        assert completion.status in (Status.SUCCESS, Status.IO_TIMEOUT, Status.CANCELED), completion
        say("a send in between:", completion.status.name)
        subprocess.run(["ip", "link", "set", netdev, "up"], check=True, timeout=DEADLINE_S)
        wait_until(lambda: adapter.port_state == "active", "the event arrives", NOTICE_S)
        expect_event(events, EventKind.PORT_ACTIVE)
        assert next(info.state for info in ndpy.list_adapters() if info.name == name) == "active"
        wait_until(lambda: host_of(adapter), "the address is back", NOTICE_S)
        assert_works(keep, connect_pair(keep, adapter))
        say("works again")
        keep.close()


if __name__ == "__main__":
    what = {function.__name__: function for function in (removal, removal_in_a_scenario, second_removal, port)}
    what[sys.argv[1]](*sys.argv[2:])
