"""A program that waits on its own completion port, with adapter.overlapped_file and CompletionQueue.notify()."""

import ctypes
from ctypes import wintypes

import pytest
from kit.helpers import DEADLINE_S, connect_ends, create_end, memory, succeed

import ndpy

WAIT_TIMEOUT = 258

kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
kernel32.CreateIoCompletionPort.restype = wintypes.HANDLE
kernel32.CreateIoCompletionPort.argtypes = [wintypes.HANDLE, wintypes.HANDLE, ctypes.c_size_t, wintypes.DWORD]
kernel32.GetQueuedCompletionStatus.argtypes = [
    wintypes.HANDLE,
    ctypes.POINTER(wintypes.DWORD),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(ctypes.c_void_p),
    wintypes.DWORD,
]
kernel32.CloseHandle.argtypes = [wintypes.HANDLE]


@pytest.fixture
def port(adapter):
    """The program's own completion port for the adapter's overlapped file, with key 77."""
    handle = kernel32.CreateIoCompletionPort(adapter.overlapped_file, None, 77, 0)
    assert handle, ctypes.get_last_error()
    yield handle
    kernel32.CloseHandle(handle)


def next_packet(port, timeout_ms=int(DEADLINE_S * 1000)):
    """(key, address of the OVERLAPPED) of the next packet, or None if none comes in time."""
    size, key, overlapped = wintypes.DWORD(), ctypes.c_size_t(), ctypes.c_void_p()
    if not kernel32.GetQueuedCompletionStatus(port, size, key, overlapped, timeout_ms):
        assert overlapped.value is not None or ctypes.get_last_error() == WAIT_TIMEOUT
        if overlapped.value is None:
            return None
    return key.value, overlapped.value


def test_c_1_5_the_packet_comes_to_the_programs_own_port(adapter, keep, port):
    queue = keep(adapter.create_completion_queue(16, overlapped_file=adapter.overlapped_file))
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, cq=queue))
    region = memory(keep, adapter, 64)
    for _ in range(3):
        pair.server.queue_pair.receive(region)
        overlapped = queue.notify()
        assert overlapped
        assert next_packet(port, 50) is None
        with pytest.raises(ndpy.DeviceBusyError):
            queue.notify()
        pair.client.queue_pair.send([])
        assert next_packet(port) == (77, overlapped)
        assert len(queue.poll()) == 1
        succeed(pair.client.cq)


def test_wait_works_beside_the_programs_own_port(adapter, keep, port):
    queue = keep(adapter.create_completion_queue(16, overlapped_file=adapter.overlapped_file))
    pair = connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, cq=queue))
    pair.server.queue_pair.receive([])
    pair.client.queue_pair.send([])
    succeed(queue)
    assert next_packet(port, 50) is None


def test_closing_the_queue_ends_the_notification_with_a_packet(adapter, keep, port):
    queue = adapter.create_completion_queue(16, overlapped_file=adapter.overlapped_file)
    overlapped = queue.notify()
    queue.close()
    assert next_packet(port) == (77, overlapped)
    with pytest.raises(ndpy.ClosedError):
        queue.notify()


def test_each_kind_of_queue_says_what_it_is_for(adapter, keep, port):
    own = keep(adapter.create_completion_queue(16, overlapped_file=adapter.overlapped_file))
    usual = keep(adapter.create_completion_queue(16))
    poller = keep(ndpy.Poller())
    for call in (own.arm, lambda: poller.add(own), usual.notify):
        with pytest.raises(ndpy.UnsupportedError, match=r"notify\(\)|overlapped_file"):
            call()
