"""Wrong arguments and refusals in verbs' queues, queue pairs, windows and pollers. The provider has no device."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import select
import threading

import pytest
from fake_verbs import opened
from kit.deadlines import DEADLINE_S
from kit.helpers import wait_until
from racing import Elsewhere
from test_references import SharedQueue

import ndpy
from ndpy import Access, Capability, Endpoint, Operation, Status
from ndpy.objects.resource import Orphans
from ndpy.platforms.verbs.events import EventThread
from ndpy.platforms.verbs.memory import native_access
from ndpy.platforms.verbs.native_calls import lib
from ndpy.vocabulary.info import Gid

SERVER = ("127.0.0.1", 4791)
LOCAL_WRITE, REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC, ON_DEMAND = 1, 2, 4, 8, 1 << 6  # enum ibv_access_flags


adapter = opened(windows=1)


@pytest.mark.parametrize(
    ("native", "rate", "expected"),
    [
        (4000, "100 Gb/sec (4X EDR)", 400.0),
        (25, "", 2.5),
        (0, "2.5 Gb/sec (1X SDR)", 2.5),
        (0, "100 Gb/sec (4X EDR)", 100.0),
        (0, "", None),
        (0, "Invalid argument", None),
    ],
)
def test_a_port_tells_its_speed(fake, native, rate, expected):
    """The call comes first; older libraries leave it to sysfs."""
    folder = fake.folder / "ports/1"
    folder.mkdir(parents=True)
    (folder / "rate").write_text(rate + "\n")
    with fake.open(speed=native) as adapter:
        assert adapter.info.ports[0].speed_gbps == expected


def test_a_queue_pair_tells_what_is_written_in_order(fake, adapter, queue, queue_pair):
    assert Capability.DATA_IN_ORDER in adapter.info.capabilities
    assert not queue_pair.data_in_order()
    fake.settings.in_order = 1 << lib.IBV_WR_RDMA_WRITE | 1 << lib.IBV_WR_SEND
    assert [
        queue_pair.data_in_order(operation) for operation in (Operation.WRITE, Operation.RECEIVE, Operation.READ)
    ] == [True, True, False]
    with pytest.raises(ValueError, match="SEND writes no message"):
        queue_pair.data_in_order(Operation.SEND)
    queue_pair.close()
    with pytest.raises(ndpy.ClosedError):
        queue_pair.data_in_order()


@pytest.mark.parametrize(
    ("access", "native", "on_iwarp"),
    [
        (Access.NONE, 0, 0),
        (Access.LOCAL_WRITE, LOCAL_WRITE, LOCAL_WRITE),
        (Access.REMOTE_READ, REMOTE_READ, REMOTE_READ),
        (Access.REMOTE_WRITE, LOCAL_WRITE | REMOTE_WRITE, LOCAL_WRITE | REMOTE_WRITE),
        (Access.REMOTE_ATOMIC, LOCAL_WRITE | REMOTE_ATOMIC, LOCAL_WRITE | REMOTE_ATOMIC),
        (Access.READ_SINK, LOCAL_WRITE, LOCAL_WRITE | REMOTE_WRITE),
        (Access.ON_DEMAND, ON_DEMAND, ON_DEMAND),
    ],
    ids=str,
)
def test_each_right_has_its_native_ones(access, native, on_iwarp):
    assert native_access(access, False) == native
    assert native_access(access, True) == on_iwarp


def test_a_poll_that_the_provider_fails_says_so(fake, queue):
    fake.failures.poll = 1
    with pytest.raises(ndpy.ProviderError, match="poll"):
        queue.poll()
    assert queue.poll() == []


@pytest.mark.parametrize("closes", ["", "connector", "queue pair"])
def test_a_cancelled_request_names_the_peer_also_when_the_connection_has_gone(fake, adapter, queue, closes):
    with (
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as way,
    ):
        queue_pair.receive([])
        assert fake.complete(queue_pair, status=lib.IBV_WC_WR_FLUSH_ERR)
        (completion,) = queue.poll()
        if closes:
            {"connector": way, "queue pair": queue_pair}[closes].close()
        with pytest.raises(ndpy.CanceledError, match=r"connection from .* to 127\.0\.0\.1 port 4791 on fake0"):
            completion.raise_for_status()


def test_completions_kept_of_a_closed_queue_pair_are_its_last_trace(adapter, queue):
    with adapter.create_queue_pair(queue) as queue_pair:
        for context in range(3):
            queue_pair.receive([], context=context)
    assert queue._posted_requests
    assert [completion.context for completion in queue.poll(2)] == [0, 1]
    assert queue._posted_requests
    assert [completion.context for completion in queue.poll()] == [2]
    assert not queue._posted_requests
    with adapter.create_queue_pair(queue):
        pass
    assert not queue._posted_requests


@pytest.mark.parametrize("wrong", [{"context": 1 << 64}, {"context": -1}, {"context": "a"}, {"flags": 1 << 40}])
def test_a_bind_with_an_argument_that_does_not_fit_leaves_window_and_queue_pair_as_they_were(
    fake,
    adapter,
    queue,
    connected,
    wrong,
):
    with adapter.create_memory_window() as window, adapter.register(bytearray(64), Access.LOCAL_WRITE) as region:
        with pytest.raises((ValueError, TypeError)):
            connected.bind(window, region, **wrong)
        assert not window.is_bound
        connected.bind(window, region)
        assert fake.complete(connected, receive=False)
        assert [completion.status for completion in queue.wait(DEADLINE_S)] == [Status.SUCCESS]
        assert window.is_bound
        with pytest.raises((ValueError, TypeError)):
            connected.invalidate(window, **wrong)
        assert window.is_bound
        connected.invalidate(window)
        assert fake.complete(connected, receive=False)
        assert [completion.status for completion in queue.wait(DEADLINE_S)] == [Status.SUCCESS]
        assert not window.is_bound
    assert not fake.complete(connected, receive=False)


@pytest.mark.parametrize(
    "limit",
    ["receive_queue_depth", "initiator_queue_depth", "max_receive_sge", "max_initiator_sge", "inline_data_size"],
)
def test_a_queue_pair_may_have_none_of_a_thing_but_not_less(adapter, queue, limit):
    with adapter.create_queue_pair(queue, **{limit: 0}):
        pass
    with pytest.raises(ndpy.LimitExceededError, match=limit):
        adapter.create_queue_pair(queue, **{limit: -1})


def test_closing_the_adapter_waits_for_what_it_releases_in_the_background(fake):
    gate = threading.Event()
    adapter = fake.open()
    adapter._in_background(lambda: gate.wait(DEADLINE_S))
    # A second release must not make it forget the first.
    adapter._in_background(lambda: None)
    closing = Elsewhere(adapter.close).start()
    closing.thread.join(0.1)
    assert closing.thread.is_alive()
    assert fake.counts.contexts == 1
    gate.set()
    closing.result()


def drop_a_used_queue(adapter):
    """Drop a completion queue as if a queue pair still used it. The adapter has it then."""
    queue = adapter.create_completion_queue(8)
    queue._users = 1
    with pytest.warns(ResourceWarning, match="CompletionQueue"):
        del queue
        gc.collect()
    wait_until(lambda: adapter._orphans.waiting() and not adapter._orphans._is_closing, "it waits")


def end_its_use(adapter):
    (waiting,) = adapter._orphans.waiting()
    waiting._users = 0


@pytest.mark.parametrize("closes", ["another queue", "the adapter"])
def test_what_waited_for_a_user_is_closed_when_something_closes(fake, closes):
    adapter = fake.open()
    other = adapter.create_completion_queue(8)
    drop_a_used_queue(adapter)
    if closes == "another queue":
        end_its_use(adapter)
        assert fake.counts.queues == 2
        other.close()
        wait_until(lambda: fake.counts.queues == 0, "it is closed")
        adapter.close()
    else:
        other.close()
        with pytest.raises(ndpy.DeviceBusyError, match="CompletionQueue"):
            adapter.close()
        end_its_use(adapter)
        adapter.close()
        assert fake.counts.queues == 0


def test_a_poller_that_is_dropped_frees_what_it_has(adapter):
    before = len(os.listdir("/proc/self/fd"))
    poller = ndpy.Poller()
    assert len(os.listdir("/proc/self/fd")) > before
    del poller
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_pollers_descriptor_is_readable_when_it_has_something_to_do(fake, adapter, queue):
    poller = ndpy.Poller()
    with adapter.create_queue_pair(queue) as queue_pair:
        poller.add(queue)
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(0)
        assert select.select([poller.fileno()], [], [], 0)[0] == []
        queue_pair.receive([], context=7)
        assert fake.complete(queue_pair)
        assert select.select([poller.fileno()], [], [], DEADLINE_S)[0]
        ((ready, completions),) = poller.wait(DEADLINE_S)
        assert ready is queue
        assert [completion.context for completion in completions] == [7]
    poller.close()
    with pytest.raises(ndpy.ClosedError):
        poller.fileno()
    with pytest.raises(ndpy.ClosedError), poller:
        pass


class _Handler:
    def __init__(self) -> None:
        self.calls = 0

    def handle(self) -> None:
        self.calls += 1


def test_a_descriptor_that_is_forgotten_is_out_of_the_epoll_although_it_stays_open():
    """Otherwise, if a forked child holds it open, the thread would spin."""
    events = EventThread("test", Orphans())
    reader, writer = os.pipe()
    handler = _Handler()
    try:
        events.watch(reader, handler.handle)
        events.forget(reader)
        events.forget(reader)
        os.write(writer, b"x")
        assert events._epoll.poll(0) == []
        assert handler.calls == 0
    finally:
        events.stop()
        os.close(reader)
        os.close(writer)


def test_no_binding_of_a_window_has_the_token_of_an_earlier_one(fake, adapter, queue, connected):
    """The program controls only the low byte of a token. After 255 tokens, the window gets another native window."""
    tokens = []
    with adapter.create_memory_window() as window, adapter.register(bytearray(64), Access.LOCAL_WRITE) as region:
        for _ in range(600):
            connected.bind(window, region)
            tokens.append(window.remote().token)
            connected.invalidate(window)
            assert fake.complete(connected, receive=False)
            assert fake.complete(connected, receive=False)
            assert len(queue.poll()) == 2
    assert len(set(tokens)) == 600
    assert len({token >> 8 for token in tokens}) == 3


def test_a_queue_pairs_number_is_the_providers_until_it_is_closed(fake, adapter, queue):
    with adapter.create_queue_pair(queue) as first, adapter.create_queue_pair(queue) as second:
        assert second.number == first.number + 1 == second._number
    with pytest.raises(ndpy.ClosedError):
        assert first.number


@pytest.mark.parametrize(("node", "told"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_driver_and_numa_node_are_what_the_kernel_says(fake, node, told):
    device = fake.folder / "device"
    device.mkdir(parents=True)
    driver = fake.folder.parent.parent / "drivers/mlx5_core"
    driver.mkdir(parents=True)
    (device / "driver").symlink_to(driver)
    if node is not None:
        (device / "numa_node").write_text(node)
    with fake.open() as adapter:
        assert (adapter.info.driver, adapter.info.numa_node) == ("mlx5_core", told)


@pytest.mark.parametrize("end", ["close", "removal"])
def test_a_listener_that_has_ended_takes_no_more_calls(fake, adapter, end):
    listener = adapter.listen(("127.0.0.1", 0))
    if end == "removal":
        fake.remove(adapter)
        wait_until(lambda: adapter._defunct is not None, "the removal is known")
    else:
        listener.close()
    wrong = ndpy.ClosedError if end == "close" else ndpy.DeviceRemovedError
    with pytest.raises(wrong):
        listener.begin_get_request()
    listener.close()


def test_an_adapter_that_is_dropped_frees_all_its_descriptors(fake):
    """The adapter's own thread closes it. A thread cannot wait for itself."""
    with fake.open():
        pass
    before = len(os.listdir("/proc/self/fd"))
    adapter = fake.open()
    with pytest.warns(ResourceWarning, match="fake0"):
        del adapter
        gc.collect()
    wait_until(lambda: len(os.listdir("/proc/self/fd")) == before, "the descriptors are closed")


def test_a_closed_queue_pair_connects_to_no_endpoint(adapter, queue):
    remote = Endpoint(lid=1, qp_number=1, psn=1, gid=bytes(16), gid_index=0, gid_type="", mtu=1024, port=1)
    with adapter.create_queue_pair(queue) as queue_pair:
        pass
    with pytest.raises(ndpy.ClosedError):
        queue_pair.connect_endpoint(remote)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_queue_pair_is_unused_or_used_up_after_a_failed_connect_endpoint(fake, adapter, queue, failing):
    """From the first step on, messages may come, so a receive may have been used."""
    ends = [Endpoint(lid=1, qp_number=number, psn=1, gid=bytes(16), mtu=1024) for number in (1, 2)]
    steps = []

    def fail(name: bytes, after: int) -> None:
        if name == b"ibv_modify_qp" and not after:
            steps.append(name)
            if len(steps) == failing:
                fake.failures.modify_qp = errno.ENOMEM

    with adapter.create_queue_pair(queue) as queue_pair:
        queue_pair._local = ends[0]
        queue_pair.receive([], context=7)
        fake.call_at_points(fail)
        with pytest.raises(ndpy.InsufficientResourcesError):
            queue_pair.connect_endpoint(ends[1])
        fake.call_at_points(None)
        assert queue_pair.connection_ended == (failing == 2)
        if failing == 1:
            queue_pair.connect_endpoint(ends[1])
            assert queue.poll() == []
        else:
            (completion,) = queue.wait(DEADLINE_S)
            assert (completion.context, completion.status) == (7, Status.CANCELED)
            with pytest.raises(ndpy.ConnectionActiveError):
                queue_pair.connect_endpoint(ends[1])


@pytest.mark.parametrize(("said", "told"), [(0, 16), (4, 4), (30, 16)])
def test_a_read_has_as_many_elements_as_the_driver_says_and_no_more_than_a_send(fake, said, told):
    with fake.open(read_sge=said) as adapter:
        assert adapter.info.max_read_sge == told


@pytest.mark.parametrize("road", ["read()", "batch"])
def test_a_read_into_more_elements_than_the_driver_says_is_refused(fake, road):
    """siw would fill the first one and report success."""
    with (
        fake.open(read_sge=2) as adapter,
        adapter.create_completion_queue(8) as queue,
        adapter.create_queue_pair(queue, max_initiator_sge=4) as queue_pair,
        adapter.register(bytearray(8), Access.LOCAL_WRITE) as region,
    ):
        remote = ndpy.RemoteMemory(0, 8, 0)

        def post(count):
            local = [region[place : place + 1] for place in range(count)]
            if road == "read()":
                queue_pair.read(local, remote)
            else:
                batch = ndpy.Batch(1, max_sge=4)
                batch.read(local, remote)
                queue_pair.post(batch)

        with pytest.raises(
            ndpy.LimitExceededError, match=r"3 elements are more than the 2 that .* \(info\.max_read_sge\)"
        ):
            post(3)
        # Nothing else keeps a read into two from being posted.
        with pytest.raises(ndpy.NotConnectedError):
            post(2)


def test_an_accept_that_is_given_up_ends_the_queue_pair(fake, adapter, queue):
    """The provider may have begun to connect it."""
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_ESTABLISHED
    with adapter.listen(("127.0.0.1", 0)) as listener, adapter.create_queue_pair(queue) as queue_pair:
        fake.request(listener)
        with listener.get_request(DEADLINE_S) as connector:
            queue_pair.receive([], context=7)
            assert connector.begin_accept(queue_pair).cancel()
            assert queue_pair.connection_ended
            (completion,) = queue.wait(DEADLINE_S)
            assert (completion.context, completion.status) == (7, Status.CANCELED)


def test_a_disconnect_after_a_failure_waits_for_the_peer_which_was_told_before(fake, adapter, queue, connected):
    """A second rdma_disconnect() is refused, which looks as if there were no peer to wait for."""
    connector = connected.connector
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_DISCONNECTED
    connected.receive([])
    assert fake.complete(connected, status=lib.IBV_WC_LOC_PROT_ERR)
    assert len(queue.wait(DEADLINE_S)) == 1
    disconnecting = connector.begin_disconnect()
    assert not disconnecting.done()
    assert fake.connection_event(connector, lib.RDMA_CM_EVENT_DISCONNECTED)
    disconnecting.result(DEADLINE_S)


def test_a_message_may_be_as_long_as_the_port_says(adapter):
    assert adapter.info.max_transfer_length == 1 << 30


def test_a_backlog_may_be_without_limit_and_not_negative(adapter):
    with adapter.listen(("127.0.0.1", 0), backlog=0):
        pass
    with pytest.raises(ValueError, match="backlog"):
        adapter.listen(("127.0.0.1", 0), backlog=-1)


def test_a_listener_that_is_closed_while_it_is_asked_says_so(adapter, monkeypatch):
    listener = adapter.listen(("127.0.0.1", 0))
    monkeypatch.setattr(listener, "_warn_of_refusals", listener.close)
    with pytest.raises(ndpy.ClosedError):
        listener.begin_get_request()


def test_a_queue_shrinks_to_what_waits_in_it_and_not_below_one(fake, adapter):
    with adapter.create_completion_queue(64) as queue, adapter.create_queue_pair(queue) as queue_pair:
        for wrong in (0, adapter.info.max_completion_queue_depth + 1):
            with pytest.raises(ndpy.LimitExceededError, match=str(wrong)):
                queue.resize(wrong)
        for context in range(3):
            queue_pair.receive([], context=context)
            assert fake.complete(queue_pair)
        with pytest.raises(ndpy.LimitExceededError, match="3 completions"):
            queue.resize(2)
        queue.resize(3)
        assert [completion.context for completion in queue.poll()] == [0, 1, 2]
        queue.resize(1)
        assert queue.depth == 1


def test_a_closed_adapter_says_so_before_it_says_what_it_lacks(fake):
    with fake.open() as adapter, pytest.raises(ndpy.UnsupportedError):
        adapter.register_dmabuf(0, 0, 64, 0)
    with pytest.raises(ndpy.ClosedError):
        adapter.register_dmabuf(0, 0, 64, 0)


@pytest.mark.parametrize("listed", [False, True], ids=["an element", "a list"])
@pytest.mark.parametrize("operation", ["receive", "send", "read", "write"])
def test_a_request_with_an_argument_that_does_not_fit_is_not_posted(fake, adapter, queue, connected, operation, listed):
    receive = operation == "receive"
    records = connected._posted_requests.receive if receive else connected._posted_requests.initiator
    with adapter.register(bytearray(16), Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE) as region:
        elements = [region[:]] if listed else region[:]
        remote = [region.remote()] if operation in ("read", "write") else []

        def post(**arguments):
            getattr(connected, operation)(elements, *remote, **arguments)

        post(context=1)
        wrong = [({"context": 1 << 64}, ValueError), ({"context": "a"}, TypeError)]
        for arguments, kind in wrong if receive else [*wrong, ({"flags": 1 << 40}, ValueError)]:
            with pytest.raises(kind):
                post(**arguments)
        post(context=2)
        assert len(records) == 2
        assert [fake.complete(connected, receive=receive) for _ in range(3)] == [True, True, False]
        assert [completion.context for completion in queue.poll()] == [1, 2]
        with pytest.raises(ndpy.QueueFullError):
            while True:
                post()
        assert len(records) == (
            connected.limits.receive_queue_depth if receive else connected.limits.initiator_queue_depth
        )


@pytest.mark.parametrize("listed", [False, True], ids=["an element", "a list"])
@pytest.mark.parametrize("operation", ["receive", "send", "read", "write"])
def test_a_request_of_4_gib_is_too_long(adapter, connected, operation, listed):
    """The length of a native element has 32 bits."""
    length = 1 << 32
    with adapter.register((4096, length), Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE) as region:
        remote = [region.remote()] if operation in ("read", "write") else []
        with pytest.raises(ndpy.LimitExceededError, match=f"{length} bytes"):
            getattr(connected, operation)([region] if listed else region[:], *remote)
        assert not connected._posted_requests.receive
        assert not connected._posted_requests.initiator


def test_a_shared_receive_of_4_gib_is_too_long_and_takes_no_place(adapter):
    with SharedQueue(adapter, 1, 1, 0) as shared, adapter.register((4096, 1 << 32), Access.LOCAL_WRITE) as region:
        with pytest.raises(ndpy.LimitExceededError):
            shared.receive(region)
        shared.receive(region[0:64])
        with pytest.raises(ndpy.QueueFullError):
            shared.receive(region[0:64])


def test_what_is_known_of_an_adapter_can_be_written_as_json(adapter):
    gid = Gid(index=3, value=bytes(range(16)), type="RoCE v2", address="1:203::", netdev="eth2.10", vlan=10)
    info = dataclasses.replace(adapter.info, ports=(dataclasses.replace(adapter.info.ports[0], gids=(gid,)),))
    values = json.loads(json.dumps(info.to_dict()))
    assert values["ports"][0]["gids"] == [
        {
            "index": 3,
            "value": gid.value.hex(),
            "type": gid.type,
            "address": gid.address,
            "netdev": "eth2.10",
            "vlan": 10,
        }
    ]
    assert values["capabilities"] == info.capabilities.names()
    assert values["name"] == "fake0"


def test_a_window_tells_what_it_is_bound_to(fake, adapter, queue, connected):
    def told(window):
        return window.region, window.queue_pair, window.access, window.length

    with adapter.create_memory_window() as window, adapter.register(bytearray(64), Access.LOCAL_WRITE) as region:
        assert window.adapter is adapter
        assert told(window) == (None, None, Access.NONE, 0)
        connected.bind(window, region[16:48], Access.REMOTE_READ)
        assert told(window) == (region, connected, Access.REMOTE_READ, 32)
        assert window.remote() == ndpy.RemoteMemory(region.address + 16, 32, window.remote_token)
        connected.invalidate(window)
        assert fake.complete(connected, receive=False)
        assert fake.complete(connected, receive=False)
        assert len(queue.poll()) == 2
        assert told(window) == (None, None, Access.NONE, 0)
        with pytest.raises(ndpy.NdpyError, match="not bound"):
            assert window.remote_token


@pytest.mark.parametrize("iwarp", [False, True])
@pytest.mark.parametrize("how", ["reject", "close"])
def test_an_offer_that_is_turned_down_ends_the_queue_pair_on_iwarp_only(fake, iwarp, how):
    """On iWARP the connection is already established, so the queue pair had to be given to it."""
    fake.have_address()
    if iwarp:
        fake.speak_iwarp()
    with fake.open_pair() as (adapter, queue, queue_pair):
        queue_pair.receive([], context=7)
        with adapter.create_connector() as connector:
            connector.connect(queue_pair, SERVER, timeout_s=DEADLINE_S)
            assert connector.state == "offered"
            getattr(connector, how)()
        assert queue_pair.connection_ended == iwarp
        if iwarp:
            (completion,) = queue.poll()
            assert (completion.context, completion.status) == (7, Status.CANCELED)
        else:
            assert queue.poll() == []
            with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S):
                assert fake.complete(queue_pair)
            assert [completion.context for completion in queue.poll()] == [7]


def test_a_request_over_another_device_is_refused_and_forgotten(fake, adapter):
    """Several devices may have the same address. A connection of one device cannot use another device's memory."""
    with adapter.listen(("127.0.0.1", 0)) as listener:
        before = fake.counts.identifiers
        fake.request(listener, elsewhere=True)
        fake.request(listener)
        listener.get_request(DEADLINE_S).close()
        with pytest.raises(ndpy.TimeoutError):
            listener.get_request(0)
        assert fake.counts.identifiers == before
        # Otherwise this client would wait for an answer until it gives up. The other one was turned down by close().
        assert fake.connecting.rejected == 2


def _data_kib() -> int:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData:"))


def test_a_queue_pair_that_cannot_be_made_leaves_no_memory(fake, adapter, queue):
    def fail() -> None:
        fake.failures.modify_qp = errno.ENOMEM
        with pytest.raises(ndpy.InsufficientResourcesError):
            adapter.create_queue_pair(queue, receive_queue_depth=1000, initiator_queue_depth=1000)
        assert fake.counts.queue_pairs == 0

    before = _data_kib()
    for _ in range(400):
        fail()
    # ndpy's rings have 64 KiB. The provider's rings have 16 KiB, and it never frees them.
    assert _data_kib() - before < 400 * 32


@pytest.mark.parametrize(
    "address", ["192.0.2.1:4791", "12", b"12", (None, 4791), (b"192.0.2.1", 1), ("::1", float("inf"))]
)
@pytest.mark.parametrize("call", ["connect", "bind", "listen"])
def test_what_is_no_pair_of_host_and_port_is_refused_and_not_taken_apart(adapter, queue, call, address):
    """The first two characters of a text are not its host and its port."""
    with adapter.create_queue_pair(queue) as queue_pair, adapter.create_connector() as connector:
        with pytest.raises(ValueError, match=r"an address is \(host, port\)"):
            if call == "connect":
                connector.begin_connect(queue_pair, address)
            elif call == "bind":
                connector.bind(address)
            else:
                adapter.listen(address)
        assert connector.state == "idle"


def test_the_wildcard_can_be_bound_too(adapter, queue):
    with adapter.create_connector() as connector, adapter.create_queue_pair(queue) as queue_pair:
        connector.bind(("", 0))
        host, port = connector.local_address
        assert (host, connector.state) == ("127.0.0.1", "bound")
        assert port
        connector.connect(queue_pair, SERVER, timeout_s=DEADLINE_S)


def test_a_bound_connector_tells_its_address_after_an_attempt_that_failed_too(fake, adapter, queue):
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_CONNECT_RESPONSE
    with adapter.create_connector() as connector, adapter.create_queue_pair(queue) as queue_pair:
        connector.bind(("127.0.0.1", 0))
        bound = connector.local_address
        connecting = connector.begin_connect(queue_pair, SERVER)
        assert fake.connection_event(connector, lib.RDMA_CM_EVENT_REJECTED, 28)
        with pytest.raises(ndpy.ConnectionRefusedError):
            connecting.result(DEADLINE_S)
        assert (connector.state, connector.local_address) == ("bound", bound)
        with pytest.raises(ndpy.NotConnectedError):
            _ = connector.peer_address


def test_a_post_is_not_lost_when_the_close_of_its_region_fails_meanwhile(adapter, queue, monkeypatch):
    """The region cannot be used at the first look, and can be used when the reason is asked for."""
    with adapter.create_queue_pair(queue) as queue_pair, adapter.register(bytearray(64)) as region:

        def close_has_failed(*arguments):
            region._defunct = None

        monkeypatch.setattr(queue_pair, "_require_same_adapter", close_has_failed)
        region._defunct = region._closed_error
        queue_pair.receive(region[0:8])
        assert queue_pair._in_flight() == 1
