"""When Windows, the C library or the extension module runs out of something, the caller is told and nothing leaks."""

from __future__ import annotations

import importlib
import sys

import pytest
from kit.helpers import DEADLINE_S, wait_until
from kit.scenarios import slow_call
from own_softnd import keep_with_adapter, open_handles

import ndpy
from ndpy.platforms.networkdirect import native_calls
from ndpy.platforms.networkdirect.native_calls import ffi
from ndpy.platforms.networkdirect.overlapped import Request, run

BOTH = pytest.mark.parametrize("version", [2, 1])
LARGE_PAGE = 2 << 20


@pytest.fixture
def keep(softnd):
    yield from keep_with_adapter(softnd)


MADE = {
    "completion queue": ("ndpy_completion_queue_new", lambda adapter, queue: adapter.create_completion_queue(8)),
    "queue pair": ("ndpy_queue_pair_new", lambda adapter, queue: adapter.create_queue_pair(queue)),
    "shared receive queue": ("ndpy_shared_queue_new", lambda adapter, queue: adapter.create_shared_receive_queue(8)),
    "endpoint": ("version1_endpoint_new", lambda adapter, queue: adapter.create_queue_pair(queue)),
    "window": ("version1_window_new", lambda adapter, queue: adapter.create_memory_window()),
    "request": ("ndpy_request_new", lambda adapter, queue: adapter.register(bytearray(64))),
    "request of a region": (
        "ndpy_request_new",
        lambda adapter, queue: adapter.begin_register(bytearray(64)).result(20),
    ),
    "request of a listener": ("ndpy_request_new", lambda adapter, queue: adapter.listen(("", 0))),
}


@pytest.mark.parametrize(
    ("version", "what"),
    [(2, what) for what in MADE if not MADE[what][0].startswith("version1")]
    + [(1, what) for what in MADE if what != "shared receive queue"],
)
def test_without_memory_an_object_is_not_made_and_leaves_nothing(keep, version, what, native):
    function, make = MADE[what]
    queue = keep(keep.adapter.create_completion_queue(8))
    setattr(native, function, lambda *arguments: ffi.NULL)
    # softnd counts the objects it makes. At the end it reports those that are left.
    with pytest.raises(ndpy.InsufficientResourcesError, match=r"out of memory|no event"):
        make(keep.adapter, queue)
    delattr(native, function)
    keep(make(keep.adapter, queue))


@BOTH
def test_completions_that_cannot_be_kept_for_want_of_memory_are_told(keep, version, native):
    queue = keep(keep.adapter.create_completion_queue(8))
    queue._native_drain = lambda *arguments: -12
    with pytest.raises(ndpy.InsufficientResourcesError) as caught:
        queue.wait(DEADLINE_S)
    assert caught.value.native == 12
    del queue._native_drain
    with pytest.raises(ndpy.TimeoutError):
        queue.wait(0)


@pytest.mark.parametrize("version", [1])
def test_i_6_1_a_flush_without_memory_says_so(keep, version, native):
    queue_pair = keep(keep.adapter.create_queue_pair(keep(keep.adapter.create_completion_queue(8))))
    native.ndpy_cancel_rest = lambda *arguments: -12
    with pytest.raises(ndpy.InsufficientResourcesError) as caught:
        queue_pair.flush()
    assert caught.value.native == 12
    del native.ndpy_cancel_rest
    queue_pair.flush()


# ---- completion ports ----


@BOTH
@pytest.mark.parametrize(("refused", "words"), [(1, "no completion port"), (2, "takes no completion port")])
def test_an_adapter_without_a_completion_port_is_not_opened(softnd, version, native, refused, words):
    create, calls = native_calls.lib.CreateIoCompletionPort, []

    def creating(*arguments):
        calls.append(arguments)
        return ffi.NULL if len(calls) == refused else create(*arguments)

    native.CreateIoCompletionPort = creating
    native.GetLastError = lambda: 8
    with pytest.raises(ndpy.ProviderError, match=words) as caught:
        softnd.open()
    assert (caught.value.operation, caught.value.native) == ("open adapter", 8)


def test_a_poller_without_a_completion_port_is_not_made(native):
    native.CreateIoCompletionPort = lambda *arguments: ffi.NULL
    native.GetLastError = lambda: 8
    closed: list[object] = []
    native.CloseHandle = lambda handle: closed.append(handle)
    with pytest.raises(ndpy.ProviderError, match="no completion port") as caught:
        ndpy.Poller()
    assert caught.value.native == 8
    del caught
    assert closed == []


def test_a_pollers_port_that_fails_is_an_error_with_its_number(keep, native):
    poller = keep(ndpy.Poller())
    poller.add(keep(keep.adapter.create_completion_queue(8)))
    take = native.ndpy_take_packets
    native.ndpy_take_packets = lambda port, *rest: -6 if port == poller._port else take(port, *rest)
    with pytest.raises(ndpy.ProviderError, match="the completion port failed") as caught:
        poller.wait(DEADLINE_S)
    assert (caught.value.operation, caught.value.native) == ("wait", 6)
    del native.ndpy_take_packets
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)


def test_a_pollers_port_that_was_closed_meanwhile_is_said_to_be_closed(keep, native):
    poller = ndpy.Poller()

    def close_then_fail(port, *rest):
        del native.ndpy_take_packets
        poller._closed = True
        return -6

    native.ndpy_take_packets = close_then_fail
    try:
        with pytest.raises(ndpy.ClosedError):
            poller._native_wait(None)
    finally:
        poller._closed = False
        poller.close()


def test_the_port_of_a_poller_is_told_while_it_is_open(keep):
    poller = ndpy.Poller()
    assert poller.completion_port == int(ffi.cast("uintptr_t", poller._port))
    poller.close()
    with pytest.raises(ndpy.ClosedError):
        _ = poller.completion_port


def test_an_adapters_port_that_fails_is_reported_and_the_adapter_can_be_closed(softnd, native, monkeypatch):
    reported = []
    monkeypatch.setattr("sys.unraisablehook", lambda what: reported.append(str(what.exc_value)))
    take = native.ndpy_take_packets
    native.ndpy_take_packets = lambda *arguments: min(take(*arguments), 0) - 6
    adapter = softnd.open()
    adapter._events.wake()
    adapter._events._thread.join(DEADLINE_S)
    assert not adapter._events._thread.is_alive()
    adapter.close()
    (message,) = reported
    assert "completion port" in message
    assert "native status 6" in message


# ---- alloc() ----


def huge(native, memory=ffi.NULL, number: int = 0, page: int = LARGE_PAGE) -> None:
    native.GetLargePageMinimum = lambda: page
    native.VirtualAllocExNuma = lambda *arguments: memory
    native.GetLastError = lambda: number


def test_large_pages_need_a_right_which_the_error_names(native):
    huge(native, number=1314)
    with pytest.raises(ndpy.InsufficientResourcesError, match="SeLockMemoryPrivilege") as caught:
        ndpy.alloc(10, huge_pages=True)
    assert f"{LARGE_PAGE} bytes could not be allocated" in str(caught.value)
    assert (caught.value.operation, caught.value.native) == ("alloc", 1314)


def test_memory_that_is_short_is_told_with_windows_number(native):
    huge(native, number=1455)
    for options in ({"huge_pages": True}, {"numa_node": 0}):
        with pytest.raises(ndpy.InsufficientResourcesError, match="could not be allocated") as caught:
            ndpy.alloc(10, **options)
        assert "SeLockMemoryPrivilege" not in str(caught.value)
        assert caught.value.native == 1455


def test_a_system_without_large_pages_says_so(native):
    huge(native, page=0)
    with pytest.raises(ndpy.UnsupportedError, match="no large pages"):
        ndpy.alloc(10, huge_pages=True)
    huge(native, number=87)
    with pytest.raises(ndpy.UnsupportedError, match="MEM_LARGE_PAGES") as caught:
        ndpy.alloc(10, huge_pages=True)
    assert caught.value.native == 87
    # If large pages were not requested, the same number says nothing about them.
    with pytest.raises(ndpy.InsufficientResourcesError) as caught:
        ndpy.alloc(10, numa_node=0)
    assert caught.value.native == 87


def test_more_than_an_address_space_on_a_node_is_refused(native):
    native.VirtualAllocExNuma = lambda *arguments: pytest.fail("Windows is not asked")
    with pytest.raises(ndpy.InsufficientResourcesError, match="could not be allocated"):
        ndpy.alloc(1 << 63, numa_node=0)


def test_asking_for_large_pages_leaves_no_handle(native):
    huge(native, number=1314)
    before = open_handles()
    for _ in range(20):
        with pytest.raises(ndpy.InsufficientResourcesError):
            ndpy.alloc(10, huge_pages=True)
    assert open_handles() <= before + 5


# ---- the extension module ----


def test_without_the_extension_module_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "ndpy._networkdirect", None)
    monkeypatch.delitem(sys.modules, "ndpy.platforms.networkdirect.native_calls")
    with pytest.raises(ndpy.ProviderNotFoundError, match="install ndpy with pip"):
        importlib.import_module("ndpy.platforms.networkdirect.native_calls")


# ---- registrations ----


@pytest.mark.parametrize("version", [2])
def test_a_register_that_is_interrupted_lets_go_of_the_buffer(keep, version, native):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    native.IND2MemoryRegion_Register = interrupted
    buffer = bytearray(64)
    with pytest.raises(KeyboardInterrupt):
        keep.adapter.register(buffer)
    # While a bytearray is exported, it cannot grow.
    buffer.extend(b"more")


@BOTH
def test_d_6_7_a_register_that_is_interrupted_while_it_waits_leaves_nothing_registered(softnd, version, native):
    """The provider may still complete the registration. In version 1 it always does."""
    with softnd.open(slow_call("reg_mr", 300)) as adapter:
        wait, called = native.WaitForSingleObject, []

        def interrupted(*arguments):
            if not called:
                called.append(arguments)
                raise KeyboardInterrupt
            return wait(*arguments)

        native.WaitForSingleObject = interrupted
        buffer = bytearray(64)
        with pytest.raises(KeyboardInterrupt):
            adapter.register(buffer)
        buffer.extend(b"more")


def test_c_5_a_cancelled_request_that_the_provider_keeps_is_waited_for_so_long(keep, monkeypatch, native):
    monkeypatch.setattr("ndpy.platforms.networkdirect.overlapped._CANCEL_S", 0.1)
    queue = keep.adapter.create_completion_queue(8)
    pending = queue.arm()
    (request,) = queue._requests
    cancel = request._cancel
    request._cancel = lambda target: None
    with pytest.raises(ndpy.DeviceBusyError, match=r"within 0\.1 s"):
        queue.close()
    assert not queue.closed
    # A close that fails does not end the Pending.
    assert not pending.done()
    request._cancel = cancel
    queue.close()
    assert queue.closed
    with pytest.raises(ndpy.CanceledError):
        pending.result(0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("status", [0xC0000005, 0xC000009A, 0xC0000017, 0xC00000E5])
def test_d_2_a_registration_that_fails_later_says_why_and_lets_go_of_the_buffer(keep, native, status, asynchronous):
    kind = {
        0xC0000005: ndpy.AccessViolationError,
        0xC00000E5: ndpy.ProviderError,
    }.get(status, ndpy.InsufficientResourcesError)
    result, once = native.ndpy_request_result, [status]

    def failing(target, request):
        given = result(target, request) & 0xFFFFFFFF
        if given == 0x103 or not once:
            return given
        once.clear()
        # Deregister the region that softnd has made.
        region = ffi.cast("struct IND2MemoryRegion *", target)
        run("deregister", Request(region), lambda overlapped: native.IND2MemoryRegion_Deregister(region, overlapped))
        return status - (1 << 32)

    native.ndpy_request_result = failing
    buffer = bytearray(64)
    pending = keep.adapter.begin_register(buffer) if asynchronous else None
    with pytest.raises(kind) as caught:
        pending.result(DEADLINE_S) if pending else keep.adapter.register(buffer)
    assert (caught.value.operation, caught.value.native) == ("register", status)
    assert "mapped" in str(caught.value) or status != 0xC0000005
    assert "pinned" in str(caught.value) or kind is not ndpy.InsufficientResourcesError
    wait_until(lambda: keep.adapter._registering == set(), "its end is handled")
    buffer.extend(b"more")


def test_validating_rights(keep):
    for access, kind in (
        (ndpy.Access.REMOTE_ATOMIC, ndpy.UnsupportedError),
        (ndpy.Access.ON_DEMAND, ndpy.UnsupportedError),
        (ndpy.Access.FLUSH_GLOBAL, ndpy.UnsupportedError),
        (1 << 24, ndpy.InvalidFlagsError),
    ):
        with pytest.raises(kind):
            keep.adapter._known_access(access)
    assert keep.adapter._known_access(0x8000000F) == 0x8000000F
