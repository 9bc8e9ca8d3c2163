"""The process around the adapter: lockable memory, fork, signals, unmapped memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from kit.helpers import DEADLINE_S, assert_works, memory, require_kernel_driver

import ndpy
from ndpy import Access

NOBODY = 65534

MEMLOCK = f"""
import os, resource, sys, time
import ndpy
from ndpy.ndk import Mdl, NdkMr, NtStatus

adapter = ndpy.open_adapter(sys.argv[1])
adapter.register(bytearray(4096)).close()
resource.setrlimit(resource.RLIMIT_MEMLOCK, (262144, 262144))
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
held = adapter.register(ndpy.alloc(65536))
try:
    adapter.register(ndpy.alloc(1 << 20))
except ndpy.InsufficientResourcesError as error:
    print(error.native)
    print(error)
held.close()
adapter.register(ndpy.alloc(65536)).close()

def ends(length):
    told = []
    with NdkMr(adapter) as mr:
        status = mr.register(Mdl(ndpy.alloc(length)), length, 0, lambda context, status: told.append(status))
        while status is NtStatus.PENDING and not told:
            time.sleep(0.01)
    return [hex(status) for status in [status, *told]]

# Small ones inline, and those of more than 4 MiB by a thread also on a single processor.
held = [adapter.register(ndpy.alloc(61440)) for _ in range(4)]
print(*ends(61440), *ends(1 << 23))
for region in held:
    region.close()
adapter.close()
print("goes on")
"""


def test_too_little_lockable_memory_names_limit_use_and_remedy(adapter):
    """RLIMIT_MEMLOCK is 256 KiB, 64 KiB are pinned, and 1 MiB is asked for, by a user without CAP_IPC_LOCK."""
    require_kernel_driver(adapter, "memory that is locked")
    if os.geteuid():
        pytest.skip("only root can become another user")
    done = subprocess.run(
        [sys.executable, "-c", MEMLOCK, adapter.info.name], capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    number, *lines, statuses, last = done.stdout.splitlines()
    message = " ".join(lines)
    assert int(number) == errno.ENOMEM
    assert "RLIMIT_MEMLOCK" in message
    assert "262144" in message or "256 KiB" in message
    assert "65536" in message or "64 KiB" in message
    assert "ulimit -l" in message or "limits" in message
    # The kernel interface's model returns the status inline, and through the callback (contract J.15).
    assert statuses == "0xc000009a 0x103 0xc000009a"
    assert last == "goes on"


def test_partly_mapped_memory_is_refused(adapter):
    """Two pages. The second one is unmapped."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    page = mmap.PAGESIZE
    address = libc.mmap(None, 2 * page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert libc.munmap(address + page, page) == 0
    try:
        with pytest.raises(ndpy.AccessViolationError) as raised:
            adapter.register((address, 2 * page))
        assert raised.value.native == errno.EFAULT
        adapter.register((address, page)).close()
    finally:
        libc.munmap(address, page)


def test_read_only_pages_cannot_be_written(adapter):
    """ndpy cannot see how memory that Python does not own is protected. The provider finds out."""
    pages = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 3, ctypes.c_int, ctypes.c_long]
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    with pytest.raises(ndpy.AccessViolationError):
        adapter.register((address, mmap.PAGESIZE), Access.LOCAL_WRITE)
    with pytest.raises(ndpy.AccessViolationError):
        adapter.register(pages, Access.LOCAL_WRITE)
    # The kernel can pin read-only pages of a private mapping, but not of a shared one.
    adapter.register((address, mmap.PAGESIZE), Access.NONE).close()


def exit_status(pid: int) -> int:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    pytest.fail("the child hangs")


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_cannot_use_what_it_inherits(adapter, keep, pair):
    """Each use raises ClosedError, which recommends spawn. Closing is harmless. The parent goes on."""
    region = memory(keep, adapter, 64)
    element = region[0:8]
    poller = keep(ndpy.Poller())
    poller.add(pair.server.cq)
    uses = [
        lambda: adapter.register(bytearray(8)),
        lambda: adapter.create_completion_queue(8),
        lambda: pair.client.queue_pair.send(element),
        lambda: pair.client.queue_pair.receive(region),
        lambda: pair.client.cq.poll(),
        lambda: pair.client.cq.wait(0),
        lambda: pair.client.connector.disconnect(0),
        lambda: adapter.listen(("", 0)),
        lambda: region.remote(),
    ]
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = 0
            for number, use in enumerate(uses, 1):
                try:
                    use()
                    status = status or number
                except ndpy.ClosedError as error:
                    if "spawn" not in str(error):
                        status = status or 50 + number
                except BaseException:
                    status = status or 100 + number
            for thing in (region, *[end.queue_pair for end in pair], pair.client.cq, adapter):
                thing.close()
        except BaseException:
            status = 98
        finally:
            os._exit(status)
    assert exit_status(child) == 0
    assert_works(keep, pair)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_can_open_its_own(adapter, adapter_name):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with ndpy.open_adapter(adapter_name) as own, own.register(bytearray(64)) as region:
                status = 0 if region.length == 64 else 2
        finally:
            os._exit(status)
    assert exit_status(child) == 0


@pytest.mark.parametrize("what", ["completion queue", "poller", "pending"])
def test_a_signal_that_raises_nothing_does_not_end_a_wait(pair, keep, what):
    """The handler runs. The deadline still holds."""
    poller = keep(ndpy.Poller())
    poller.add(pair.server.cq)
    handled: list[int] = []
    former = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
    waits = {
        "completion queue": lambda: pair.client.cq.wait(0.6),
        "poller": lambda: poller.wait(0.6),
        "pending": lambda: pair.client.cq.arm().result(0.6),
    }
    begin = time.monotonic()
    timer.start()
    try:
        with pytest.raises(ndpy.TimeoutError):
            waits[what]()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, former)
    assert handled == [signal.SIGUSR1]
    assert 0.6 <= time.monotonic() - begin < DEADLINE_S


def test_wake_from_a_signal_handler(keep, adapter):
    poller = keep(ndpy.Poller())
    former = signal.signal(signal.SIGUSR1, lambda number, frame: poller.wake())
    timer = threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    try:
        assert poller.wait(DEADLINE_S) == []
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, former)


def test_waiting_costs_no_processor_time_with_connections_open(adapter, pair):
    """The adapter's own thread sleeps too."""
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before < 0.05
