"""Answers that the contract allows but that softnd does not give, in either version."""

from __future__ import annotations

import contextlib
import ctypes
import threading

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    bind,
    connect_pair,
    create_end,
    establish,
    memory,
    succeed,
    take,
    wait_until,
)
from kit.threads import Elsewhere
from native_answers import answering, ffi, method, original, signed
from own_softnd import keep_with_adapter

import ndpy
from ndpy import Access, Operation, Status
from ndpy.platforms.networkdirect.addresses import address_list, get_sized_buffer
from ndpy.platforms.networkdirect.native_calls import BUFFER_OVERFLOW, SUCCESS

BOTH = pytest.mark.parametrize("version", [2, 1])
NO_MORE_ENTRIES = 0x8000001A
INSUFFICIENT_RESOURCES = 0xC000009A
CONNECTION_INVALID = 0xC000023A
CONNECTION_ABORTED = 0xC0000241


@pytest.fixture
def keep(softnd):
    yield from keep_with_adapter(softnd)


def endpoint(end):
    """The native object that the data path posts to."""
    queue_pair = end.queue_pair
    return queue_pair._endpoint if queue_pair.adapter.info.version == 1 else queue_pair._qp


# ---- the data path ----

# Contract F.6.3 and B.1.3.
MEANINGS = [
    (0x00000000, Status.SUCCESS, ""),
    (0xC0000120, Status.CANCELED, "ND_CANCELED"),
    (0xC0000005, Status.ACCESS_VIOLATION, "ND_ACCESS_VIOLATION"),
    (0x80000005, Status.BUFFER_OVERFLOW, "ND_BUFFER_OVERFLOW"),
    (0xC000003C, Status.DATA_OVERRUN, "ND_DATA_OVERRUN"),
    (0xC000003E, Status.DATA_OVERRUN, "STATUS_DATA_ERROR"),
    (0xC00000B5, Status.IO_TIMEOUT, "ND_IO_TIMEOUT"),
    (0xC000013D, Status.REMOTE_ERROR, "ND_REMOTE_ERROR"),
    (0xC0000010, Status.INVALID_REQUEST, "ND_INVALID_DEVICE_REQUEST"),
    (0xC00000E5, Status.INTERNAL_ERROR, "ND_INTERNAL_ERROR"),
    (0xC0ABCDEF, Status.UNKNOWN, ""),
]


@contextlib.contextmanager
def ending(queue, version, statuses):
    """While this is open, the completions that the queue takes get these statuses, one after the other."""
    given = iter(statuses)
    get_results = original(queue._cq, "GetResults", ctypes.c_void_p, ctypes.c_size_t)

    def results(thing, out, count) -> int:
        found = get_results(thing, out, count)
        for index in range(found):
            # The results are ND2_RESULTs, or pointers to ND_RESULTs. Either structure begins with its status.
            place = out + 32 * index if version == 2 else ctypes.c_void_p.from_address(out + 8 * index).value
            ctypes.c_uint32.from_address(place).value = next(given)
        return found

    with method(queue._cq, "GetResults", results, ctypes.c_void_p, ctypes.c_size_t):
        yield


@BOTH
def test_f_6_3_each_status_of_a_completion_has_its_meaning(keep, version):
    pair = connect_pair(keep, keep.adapter)
    for _ in MEANINGS:
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.send([])
    take(pair.server.cq, len(MEANINGS))
    queue = pair.client.cq
    with ending(queue, version, [number for number, _, _ in MEANINGS]):
        completions = take(queue, len(MEANINGS))
    seen = [(completion.native_status & 0xFFFFFFFF, completion.status) for completion in completions]
    assert seen == [(number, status) for number, status, _ in MEANINGS]
    completions[0].raise_for_status()
    for completion, (number, _, name) in zip(completions[1:], MEANINGS[1:], strict=True):
        with pytest.raises(ndpy.ProviderError) as caught:
            completion.raise_for_status()
        assert (caught.value.native & 0xFFFFFFFF, caught.value.native_name) == (number, name)


REFUSALS = [
    (NO_MORE_ENTRIES, ndpy.QueueFullError),
    (CONNECTION_INVALID, ndpy.NotConnectedError),
    (INSUFFICIENT_RESOURCES, ndpy.InsufficientResourcesError),
]


@BOTH
@pytest.mark.parametrize("name", ["Send", "Receive", "Read", "Write", "Bind", "Invalidate"])
def test_f_2_a_request_that_the_provider_refuses_is_none(keep, version, name):
    """The slot is free again, and a window is unchanged."""
    pair = connect_pair(keep, keep.adapter)
    region = memory(keep, keep.adapter, 64, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    window, other = keep(keep.adapter.create_memory_window()), keep(keep.adapter.create_memory_window())
    remote = bind(pair.client, window, region[0:32], Access.REMOTE_READ | Access.REMOTE_WRITE)
    queue_pair = pair.client.queue_pair
    post = {
        "Send": lambda: queue_pair.send(region),
        "Receive": lambda: queue_pair.receive(region),
        "Read": lambda: queue_pair.read(region[0:8], remote),
        "Write": lambda: queue_pair.write(region[0:8], remote),
        "Bind": lambda: queue_pair.bind(other, region[8:16], Access.REMOTE_READ),
        "Invalidate": lambda: queue_pair.invalidate(window),
    }[name]
    for status, kind in REFUSALS:
        with answering(endpoint(pair.client), name, status) as calls:
            # Try more often than there are slots.
            for _ in range(20):
                with pytest.raises(kind) as caught:
                    post()
                assert caught.value.operation == name.lower()
        assert len(calls) == 20
    assert (caught.value.native & 0xFFFFFFFF, caught.value.native_name) == (
        INSUFFICIENT_RESOURCES,
        "ND_INSUFFICIENT_RESOURCES",
    )
    assert window.remote() == remote
    with pytest.raises(ndpy.NdpyError):
        other.remote()
    assert pair.client.cq.poll() == []
    if name not in ("Bind", "Invalidate"):
        return
    post()
    (completion,) = succeed(pair.client.cq)
    assert completion.operation.name == name.upper()


@BOTH
def test_a_request_of_windows_with_a_context_that_is_none_is_not_posted(keep, version):
    pair = connect_pair(keep, keep.adapter)
    region, window = memory(keep, keep.adapter, 64), keep(keep.adapter.create_memory_window())
    remote = bind(pair.client, window, region[0:32], Access.REMOTE_READ)
    other = keep(keep.adapter.create_memory_window())
    queue_pair = pair.client.queue_pair
    for context, kind in ((-1, ValueError), (1 << 64, ValueError), ("one", TypeError)):
        with pytest.raises(kind):
            queue_pair.invalidate(window, context=context)
        with pytest.raises(kind):
            queue_pair.bind(other, region[0:8], Access.REMOTE_READ, context=context)
    assert window.remote() == remote
    with pytest.raises(ndpy.NdpyError):
        other.remote()
    queue_pair.invalidate(window, context=5)
    (completion,) = succeed(pair.client.cq)
    assert (completion.operation, completion.context) == (Operation.INVALIDATE, 5)
    with pytest.raises(ndpy.NdpyError):
        window.remote()


@BOTH
def test_e_1_3_a_window_may_be_bound_again_behind_its_invalidation(keep, version):
    """A queue pair executes its requests in order, so the program need not wait between the two."""
    pair = connect_pair(keep, keep.adapter)
    region, window = memory(keep, keep.adapter, 64), keep(keep.adapter.create_memory_window())
    bind(pair.client, window, region[0:32], Access.REMOTE_READ)
    pair.client.queue_pair.invalidate(window)
    pair.client.queue_pair.bind(window, region[8:24], Access.REMOTE_READ)
    assert window.remote().length == 16
    succeed(pair.client.cq, 2)
    assert window.remote().length == 16
    with pytest.raises(ndpy.NdpyError):
        region.close()


@BOTH
def test_a_bind_that_failed_leaves_the_window_unbound(keep, version):
    pair = connect_pair(keep, keep.adapter)
    region, window = memory(keep, keep.adapter, 64), keep(keep.adapter.create_memory_window())
    pair.client.queue_pair.bind(window, region[0:32], Access.REMOTE_READ)
    assert window.remote().length == 32
    with ending(pair.client.cq, version, [0xC0000010]):
        (completion,) = take(pair.client.cq)
    assert completion.status is Status.INVALID_REQUEST
    with pytest.raises(ndpy.NdpyError):
        window.remote()
    # softnd has bound the window in spite of this status.
    window.close()
    region.close()


@BOTH
def test_an_invalidation_that_failed_leaves_the_window_bound(keep, version):
    pair = connect_pair(keep, keep.adapter)
    region, window = memory(keep, keep.adapter, 64), keep(keep.adapter.create_memory_window())
    remote = bind(pair.client, window, region[0:32], Access.REMOTE_READ)
    queue = pair.client.cq
    pair.client.queue_pair.invalidate(window)
    with ending(queue, version, [0xC0000120]):
        (completion,) = take(queue)
    assert completion.status is Status.CANCELED
    assert window.remote() == remote
    with pytest.raises(ndpy.NdpyError):
        region.close()


# ---- connections ----


def test_h_7_6_a_connection_whose_read_limits_are_not_told_is_none(keep, native):
    """The peer may leave between the end of Connect and this query."""
    end = create_end(keep, keep.adapter)
    native.answer("IND2Connector_GetReadLimits", CONNECTION_INVALID)
    offer = ask(keep, keep.adapter, end.queue_pair)
    offer.server.begin_accept(create_end(keep, keep.adapter).queue_pair)
    with pytest.raises(ndpy.NotConnectedError) as caught:
        offer.connecting.result(DEADLINE_S)
    assert caught.value.native == CONNECTION_INVALID
    assert offer.client.state == "failed"
    with pytest.raises(ndpy.NotConnectedError):
        offer.client.complete_connect(DEADLINE_S)
    # The provider considers the queue pair connected.
    assert end.queue_pair.connector is None
    with pytest.raises(ndpy.ConnectionActiveError, match="one connection in its life"):
        keep(keep.adapter.create_connector()).begin_connect(end.queue_pair, offer.listener.address)


@pytest.mark.parametrize("status", [SUCCESS, BUFFER_OVERFLOW, CONNECTION_ABORTED])
def test_h_7_2_private_data_that_a_provider_pads_or_does_not_tell(keep, native, status):
    def get(connector, buffer, size):
        size[0] = 600 if status == BUFFER_OVERFLOW else 20
        ffi.memmove(buffer, b"x" * min(size[0], 512), min(size[0], 512))
        return signed(status)

    native.IND2Connector_GetPrivateData = get
    offer = ask(keep, keep.adapter, create_end(keep, keep.adapter).queue_pair, private_data=b"data")
    wanted = {SUCCESS: b"x" * 20, BUFFER_OVERFLOW: b"x" * 512, CONNECTION_ABORTED: b""}[status]
    assert offer.server.private_data == wanted
    establish(offer, create_end(keep, keep.adapter).queue_pair)
    assert offer.client.private_data == wanted


def test_h_7_7_an_address_that_is_not_told_is_no_address(keep):
    pair = connect_pair(keep, keep.adapter)
    connector = keep(keep.adapter.create_connector())
    for ask_for in (lambda: connector.local_address, lambda: connector.peer_address):
        with pytest.raises(ndpy.NotConnectedError, match="address yet"):
            ask_for()
    assert pair.client.connector.local_address == pair.server.connector.peer_address
    assert pair.client.connector.peer_address == pair.server.connector.local_address


def test_h_8_6_a_disconnect_that_the_provider_refuses_has_ended_the_connection(keep, native):
    pair = connect_pair(keep, keep.adapter)
    watching = pair.client.connector.begin_wait_disconnected()
    native.answer("IND2Connector_Disconnect", CONNECTION_INVALID)
    pair.client.connector.disconnect(DEADLINE_S)
    watching.result(0)
    assert pair.client.connector.state == "disconnected"


# ---- memory ----


@BOTH
def test_a_region_that_is_closed_can_be_deregistered_again(keep, version):
    region = keep.adapter.register(bytearray(64))
    region.close()
    assert region.begin_deregister().done()


# ---- sizes and addresses ----


def lists(*entries):
    """A stand-in for a native function that fills a SOCKET_ADDRESS_LIST (contract A.5).

    Each entry is (bytes of the address, or None for a null pointer; length of the address).
    """
    head = 8 + 16 * len(entries)
    needed = head + 32 * len(entries)

    def get(buffer, size) -> int:
        if size[0] < needed:
            size[0] = needed
            return signed(BUFFER_OVERFLOW)
        ffi.memmove(buffer, bytes(needed), needed)
        ffi.cast("int32_t *", buffer)[0] = len(entries)
        for index, (address, length) in enumerate(entries):
            place = buffer + head + 32 * index
            if address is not None:
                ffi.memmove(place, address, len(address))
                ffi.cast("uintptr_t *", buffer + 8 + 16 * index)[0] = int(ffi.cast("uintptr_t", place))
            ffi.cast("int32_t *", buffer + 16 + 16 * index)[0] = length
        size[0] = needed
        return SUCCESS

    return get


def test_a_5_addresses_that_are_none_are_left_out():
    found = address_list("list", lists((b"first", 5), (None, 16), (b"none", 0), (b"none", -1), (b"l", 1)))
    assert found == [b"first", b"l"]


def test_a_5_3_a_provider_that_answers_the_sizing_call_with_success_has_no_addresses():
    assert address_list("list", lambda buffer, size: SUCCESS) == []


def test_a_5_4_the_size_may_grow_from_call_to_call_and_not_without_end():
    asked = []

    def getter(calls):
        def get(buffer, size) -> int:
            asked.append(size[0])
            if len(asked) < calls:
                size[0] += 10
                return signed(BUFFER_OVERFLOW)
            ffi.memmove(buffer, b"whole", 5)
            size[0] = 5
            return SUCCESS

        return get

    assert bytes(ffi.buffer(get_sized_buffer("get", getter(4)))) == b"whole"
    assert asked == [0, 10, 20, 30]
    asked.clear()
    with pytest.raises(ndpy.ProviderError, match="the size changes") as caught:
        get_sized_buffer("get", getter(100))
    assert caught.value.native == BUFFER_OVERFLOW
    assert len(asked) < 100
    asked.clear()
    # If a provider does not say how much it needs, the next call still offers it a buffer.
    sizes = []
    with pytest.raises(ndpy.ProviderError):
        get_sized_buffer("get", lambda buffer, size: sizes.append(size[0]) or signed(BUFFER_OVERFLOW), "size_t *")
    assert min(sizes[1:]) >= 8


# ---- requests that have ended ----


@BOTH
def test_requests_that_have_ended_are_forgotten(keep, version):
    """The adapter's thread refers only to requests whose packets may still come."""
    pair = connect_pair(keep, keep.adapter)
    begun = set(keep.adapter._events._requests)
    region = keep.adapter.begin_register(bytearray(64)).result(DEADLINE_S)
    region.begin_deregister().result(DEADLINE_S)
    armed = pair.server.cq.arm()
    pair.server.queue_pair.receive([])
    pair.client.queue_pair.send([])
    armed.result(DEADLINE_S)
    wait_until(lambda: set(keep.adapter._events._requests) == begun, "they are forgotten")
    keep.close()
    assert keep.adapter._events._requests == {}


# ---- other threads ----


@BOTH
def test_resizing_a_queue_that_is_closed_meanwhile_is_refused(keep, version):
    queue = keep.adapter.create_completion_queue(8)
    checked = threading.Event()
    check = queue._check

    def notice() -> None:
        check()
        checked.set()

    queue._check = notice
    with queue._lock:
        resizing = Elsewhere(lambda: queue.resize(16)).start()
        assert checked.wait(DEADLINE_S)
        queue._defunct = queue._closed_error
    with pytest.raises(ndpy.ClosedError):
        resizing.result()
    queue._defunct = None
    queue.close()


@BOTH
def test_whoever_comes_too_late_to_a_closed_queue_does_not_ask_the_provider(keep, version, native):
    """Another thread may close the queue after this one has looked at it and before it gets the lock."""
    queue, poller = keep.adapter.create_completion_queue(8), keep(ndpy.Poller())
    poller.add(queue)
    calls = native.answer("IND2CompletionQueue_Notify" if version == 2 else "INDCompletionQueue_Notify", SUCCESS)
    queue._defunct = queue._closed_error
    for ask_for in (lambda: queue._native_sleep(None), lambda: poller._arm(queue), queue.notify):
        with pytest.raises(ndpy.ClosedError):
            ask_for()
    queue._defunct = None
    assert calls == []
    queue.close()


def test_a_poller_delivers_what_it_has_before_it_tells_of_another_queues_trouble(keep, monkeypatch):
    pairs = [connect_pair(keep, keep.adapter) for _ in range(2)]
    poller = keep(ndpy.Poller())
    for pair in pairs:
        poller.add(pair.server.cq)
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.send([])
        succeed(pair.client.cq)
    queues = [pair.server.cq for pair in pairs]
    for queue in queues:
        wait_until(lambda queue=queue: queue._drain() == 1, "it has come")
    kind, looked_at = type(queues[0]), []
    poll = kind.poll

    def poll_or_fail(queue, *arguments):
        if queue not in looked_at:
            looked_at.append(queue)
        if queue is not looked_at[0]:
            raise ndpy.ProviderError("broken", operation="poll", native=5)
        return poll(queue, *arguments)

    with monkeypatch.context() as broken:
        broken.setattr(kind, "poll", poll_or_fail)
        ((queue, completions),) = poller.wait(DEADLINE_S)
        assert (queue, len(completions)) == (looked_at[0], 1)
        with pytest.raises(ndpy.ProviderError, match="broken"):
            poller.wait(DEADLINE_S)
    (other,) = set(queues) - {queue}
    assert len(other.poll()) == 1


# ---- windows and regions ----


@BOTH
def test_a_bind_over_another_that_succeeds_counts(keep, version):
    """The peer has invalidated the earlier binding. So far only the provider knows that."""
    pair = connect_pair(keep, keep.adapter)
    first, second = memory(keep, keep.adapter, 64), memory(keep, keep.adapter, 64)
    window = keep(keep.adapter.create_memory_window())
    bind(pair.client, window, first[0:32], Access.REMOTE_READ)
    pair.client.queue_pair.bind(window, second[0:16], Access.REMOTE_READ)
    with ending(pair.client.cq, version, [SUCCESS]):
        succeed(pair.client.cq)
    assert window.remote().length == 16
    with pytest.raises(ndpy.DeviceBusyError):
        second.close()
    window.close()
    first.close()
    second.close()


@BOTH
def test_a_deregistration_that_is_refused_leaves_the_region(keep, version, native):
    region = memory(keep, keep.adapter, 64)
    name = "IND2MemoryRegion_Deregister" if version == 2 else "INDAdapter_DeregisterMemory"
    native.answer(name, 0x80000011)
    for deregister in (region.begin_deregister, region.close):
        with pytest.raises(ndpy.DeviceBusyError):
            deregister()
        assert not region.closed
        region._check()
    delattr(native, name)
    region.close()
    assert region.closed


@pytest.mark.parametrize("version", [1])
def test_a_provider_of_version_1_that_succeeds_and_gives_nothing_is_told(keep, native):
    native.answer("INDAdapter_CreateCompletionQueue", SUCCESS)
    with pytest.raises(ndpy.ProviderError, match="gave no INDCompletionQueue") as caught:
        keep.adapter.create_completion_queue(8)
    assert caught.value.operation == "create completion queue"
