"""The monitor of memory on this machine's kernel: which changes it hears of, when, and that it blocks no call."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.helpers import rounds

if sys.platform != "linux":
    pytest.skip("userfaultfd is Linux's", allow_module_level=True)

from kit.deadlines import DEADLINE_S, patient
from kit.threads import beside, in_threads

import ndpy
from ndpy.platforms.verbs import monitor as module
from ndpy.platforms.verbs.monitor import Monitor

PAGE = mmap.PAGESIZE
PAGES = 8
PRIVATE, SHARED = 0x22, 0x21
FIXED, FIXED_NOREPLACE = 0x10, 0x100000
DONTNEED, REMOVE = 4, 9
MAYMOVE = 1

libc = ctypes.CDLL(None, use_errno=True)
# Calls through this library keep the GIL.
libc_with_gil = ctypes.PyDLL(None)
for library in (libc, libc_with_gil):
    library.mmap.restype = library.mremap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]


class Events:
    """Stands in for the adapter's thread. The test calls the handler."""

    def watch(self, fd, handler):
        self.fd, self.handler = fd, handler

    def forget(self, fd):
        assert fd == self.fd
        self.fd = None


@pytest.fixture
def told():
    """A list that gets an entry each time the monitor reports."""
    return []


@pytest.fixture
def monitor(told):
    events = Events()
    try:
        monitor = Monitor(SimpleNamespace(_events=events), lambda: told.append(1))
    except ndpy.UnsupportedError as error:
        pytest.skip(str(error))
    monitor.events = events
    yield monitor
    monitor.close()


def map_pages(count=PAGES, flags=PRIVATE, address=None):
    """The address of new memory with each page written, or None if it cannot be mapped."""
    start = libc.mmap(address, count * PAGE, 3, flags, -1, 0)
    if start == ctypes.c_void_p(-1).value:
        return None
    for page in range(count):
        ctypes.memset(start + page * PAGE, 1, 1)
    return start


def is_registered(address):
    """Whether the kernel still reports changes of the page at this address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        if rest and line[0] in "0123456789abcdef" and ":" not in first:
            inside = int(first, 16) <= address < int(rest.split()[0], 16)
        elif inside and line.startswith("VmFlags:"):
            return "uw" in line.split()
    return False


CHANGES = {
    "unmap all": lambda start: libc.munmap(start, PAGES * PAGE),
    "unmap the last page": lambda start: libc.munmap(start + 7 * PAGE, PAGE),
    "unmap a page in the middle": lambda start: libc.munmap(start + 3 * PAGE, PAGE),
    "map over it": lambda start: libc.mmap(start + PAGE, PAGE, 3, PRIVATE | FIXED, -1, 0),
    "move": lambda start: libc.munmap(libc.mremap(start, PAGES * PAGE, 64 * PAGE, MAYMOVE), 64 * PAGE),
    "shrink": lambda start: libc.mremap(start, PAGES * PAGE, 2 * PAGE, 0),
    "unmap, keeping the GIL": lambda start: libc_with_gil.munmap(start, PAGES * PAGE),
}


@pytest.mark.parametrize("flags", [PRIVATE, SHARED], ids=["private", "shared"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_known_when_the_call_that_made_it_returns(monitor, told, flags, change):
    # Neighbours on both sides leave a larger mapping no room to grow in place.
    start = map_pages(PAGES + 2, flags) + PAGE
    watch = monitor.watch(start + 100, start + PAGES * PAGE - 100)
    assert not monitor.changed(watch)
    change(start)
    assert monitor.changed(watch)
    # The descriptor of the adapter's thread becomes readable a little later.
    assert select.select([monitor.events.fd], [], [], DEADLINE_S)[0]
    monitor.events.handler()
    assert told == [1]
    monitor.unwatch(watch)


@pytest.mark.parametrize(("flags", "advice"), [(PRIVATE, DONTNEED), (SHARED, REMOVE)], ids=["dontneed", "remove"])
def test_emptied_memory_has_changed(monitor, flags, advice):
    start = map_pages(flags=flags)
    watch = monitor.watch(start, start + PAGES * PAGE)
    assert libc.madvise(start + PAGE, PAGE, advice) == 0
    assert monitor.changed(watch)
    monitor.unwatch(watch)


def test_the_thread_is_woken_by_a_change_and_sleeps_again_when_it_has_told_of_it(monitor, told):
    fd = monitor.events.fd

    def awake(timeout_s=0):
        return bool(select.select([fd], [], [], timeout_s)[0])

    start = map_pages()
    watch = monitor.watch(start, start + PAGES * PAGE)
    assert not awake()
    libc.munmap(start, PAGES * PAGE)
    assert awake(DEADLINE_S)
    monitor.events.handler()
    assert told == [1]
    assert not awake()
    monitor.unwatch(watch)
    # Children do not inherit the descriptor, and reading it never blocks.
    assert not os.get_inheritable(fd)
    assert not os.get_blocking(fd)


def test_a_closed_monitor_tells_nothing_and_leaves_its_descriptor_to_others(told):
    events = Events()
    try:
        monitor = Monitor(SimpleNamespace(_events=events), lambda: told.append(1))
    except ndpy.UnsupportedError as error:
        pytest.skip(str(error))
    fd = events.fd
    monitor.close()
    assert events.fd is None
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    # As if the thread had already begun to handle an event.
    events.handler()
    assert told == []


def test_what_does_not_touch_the_range_is_no_change(monitor):
    start = map_pages()
    watch = monitor.watch(start + 2 * PAGE, start + 4 * PAGE)
    libc.munmap(start, 2 * PAGE)
    libc.munmap(start + 4 * PAGE, PAGE)
    libc.madvise(start + 5 * PAGE, PAGE, DONTNEED)
    libc.munmap(map_pages(), PAGES * PAGE)
    ctypes.memset(start + 2 * PAGE, 7, 2 * PAGE)
    assert not monitor.changed(watch)
    monitor.unwatch(watch)
    libc.munmap(start + 2 * PAGE, 2 * PAGE)


def test_pages_are_reported_as_long_as_somebody_watches_them(monitor):
    start = map_pages()
    first = monitor.watch(start, start + 5 * PAGE)
    second = monitor.watch(start + 3 * PAGE, start + 4 * PAGE)
    monitor.unwatch(first)
    assert [is_registered(start + page * PAGE) for page in range(6)] == [False, False, False, True, False, False]
    libc.munmap(start + 3 * PAGE, PAGE)
    assert monitor.changed(second)
    monitor.unwatch(second)
    libc.munmap(start, PAGES * PAGE)


def test_a_range_is_watched_anew_after_a_change(monitor):
    start = map_pages()
    for _ in range(300):
        watch = monitor.watch(start, start + PAGES * PAGE)
        assert not monitor.changed(watch)
        libc.madvise(start, PAGE, DONTNEED)
        assert monitor.changed(watch)
        monitor.unwatch(watch)
    libc.munmap(start, PAGES * PAGE)


def test_memory_given_to_another_thread_before_munmap_returns_is_not_taken_for_the_former(monitor):
    """The kernel may give an address to another thread before the call that freed it has returned."""
    count, stale = rounds(1500, 500), []
    address = map_pages()
    wanted, done = threading.Semaphore(0), threading.Semaphore(0)
    state = {}

    def take_over():
        for _ in range(count):
            assert wanted.acquire(timeout=DEADLINE_S)
            deadline = time.monotonic() + DEADLINE_S
            while libc.mmap(address, PAGES * PAGE, 3, PRIVATE | FIXED_NOREPLACE, -1, 0) != address:
                assert time.monotonic() < deadline
            if not monitor.changed(state["watch"]):
                stale.append(1)
            done.release()

    with beside(take_over):
        for _ in range(count):
            ctypes.memset(address, 1, PAGE)
            state["watch"] = monitor.watch(address, address + PAGES * PAGE)
            wanted.release()
            libc.munmap(address, PAGES * PAGE)
            assert done.acquire(timeout=DEADLINE_S)
            monitor.unwatch(state["watch"])
    assert not stale, f"{len(stale)} of {count}"
    libc.munmap(address, PAGES * PAGE)


def test_threads_that_watch_and_unmap_do_not_hinder_each_other(monitor):
    def work(_):
        for _ in range(rounds(200, 60)):
            start = map_pages()
            watches = [monitor.watch(start + page * PAGE, start + (page + 2) * PAGE) for page in range(0, 6, 2)]
            assert not any(monitor.changed(watch) for watch in watches)
            libc.munmap(start + 2 * PAGE, PAGE)
            assert [bool(monitor.changed(watch)) for watch in watches] == [False, True, False]
            for watch in watches:
                monitor.unwatch(watch)
            libc.munmap(start, PAGES * PAGE)

    in_threads(4, work, patient(60))


def test_more_ranges_than_one_block_holds(monitor):
    start = map_pages(600)
    watches = [monitor.watch(start + page * PAGE, start + (page + 1) * PAGE) for page in range(600)]
    libc.munmap(start + 17 * PAGE, PAGE)
    libc.munmap(start + 500 * PAGE, PAGE)
    assert [page for page in range(600) if monitor.changed(watches[page])] == [17, 500]
    for watch in watches:
        monitor.unwatch(watch)
    libc.munmap(start, 600 * PAGE)


# ---- what cannot be monitored ----


def test_a_mapped_file_is_refused_by_name(monitor, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(PAGE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), PAGE) as mapped:
        address = ndpy.objects.memory.address_of(memoryview(mapped))
        with pytest.raises(ndpy.UnsupportedError, match=f"{path} is mapped there.*raw=True"):
            monitor.watch(address, address + PAGE)


def test_a_file_beside_the_range_does_not_matter(monitor, tmp_path):
    path = tmp_path / "data"
    path.write_bytes(bytes(PAGE))
    start = map_pages(3)
    with path.open("r+b") as file:
        for page in (0, 2):
            assert (
                libc.mmap(start + page * PAGE, PAGE, 3, SHARED & ~0x20 | FIXED, file.fileno(), 0) == start + page * PAGE
            )
    monitor.unwatch(monitor.watch(start + PAGE, start + 2 * PAGE))
    libc.munmap(start, 3 * PAGE)


def test_memory_of_a_memfd_is_refused(monitor):
    descriptor = os.memfd_create("shared-by-name")
    os.ftruncate(descriptor, PAGE)
    with mmap.mmap(descriptor, PAGE) as mapped:
        address = ndpy.objects.memory.address_of(memoryview(mapped))
        with pytest.raises(ndpy.UnsupportedError, match="shared-by-name"):
            monitor.watch(address, address + PAGE)
    os.close(descriptor)


def test_what_another_userfaultfd_has_is_refused(monitor):
    start = map_pages()
    descriptor = libc.syscall(323, os.O_CLOEXEC | os.O_NONBLOCK | 1)
    if descriptor < 0:
        pytest.skip("no second userfaultfd")
    api = (ctypes.c_uint64 * 3)(0xAA, 0, 0)
    assert libc.ioctl(descriptor, ctypes.c_ulong(0xC018AA3F), api) == 0
    request = (ctypes.c_uint64 * 4)(start, PAGES * PAGE, 2, 0)
    assert libc.ioctl(descriptor, ctypes.c_ulong(0xC020AA00), request) == 0
    with pytest.raises(ndpy.UnsupportedError, match="another userfaultfd"):
        monitor.watch(start, start + PAGE)
    os.close(descriptor)
    libc.munmap(start, PAGES * PAGE)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EPERM, "vm.unprivileged_userfaultfd=1"),
        (errno.ENOSYS, "CONFIG_USERFAULTFD"),
        (errno.EOPNOTSUPP, "Linux 5.7"),
    ],
)
def test_a_monitor_that_cannot_be_had_says_why(monkeypatch, number, remedy):
    monkeypatch.setattr(module, "lib", SimpleNamespace(ndpy_monitor_start=lambda: number))
    with pytest.raises(ndpy.UnsupportedError, match=remedy) as caught:
        Monitor(SimpleNamespace(_events=Events()), lambda: None)
    assert caught.value.native == number


# ---- processes ----

PROGRAM = """
import ctypes, mmap, os, sys, time
from types import SimpleNamespace
from ndpy.platforms.verbs.monitor import Monitor
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
events = SimpleNamespace(watch=lambda *_: None, forget=lambda *_: None)
monitor = Monitor(SimpleNamespace(_events=events), lambda: None)
start = libc.mmap(None, 65536, 3, 0x22, -1, 0)
watch = monitor.watch(start, start + 65536)
"""

ENDINGS = {
    "exit": "",
    "exit with the monitor closed": "monitor.unwatch(watch); monitor.close(); libc.munmap(start, 65536)",
    "unmap in a forked child": """
child = os.fork()
if not child:
    assert monitor.changed(watch)
    monitor.unwatch(watch)
    libc.munmap(start, 65536)
    other = Monitor(SimpleNamespace(_events=events), lambda: None)
    start = libc.mmap(None, 65536, 3, 0x22, -1, 0)
    watch = other.watch(start, start + 65536)
    assert not other.changed(watch)
    libc.munmap(start, 4096)
    assert other.changed(watch)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert not monitor.changed(watch)
libc.munmap(start, 4096)
assert monitor.changed(watch)
""",
    "unmap while a child lives that has inherited all": """
ready, wake = os.pipe(), os.pipe()
child = os.fork()
if not child:
    os.write(ready[1], b"x")
    os.read(wake[0], 1)
    os._exit(0)
os.read(ready[0], 1)
monitor.unwatch(watch)
monitor.close()
libc.munmap(start, 65536)
os.write(wake[1], b"x")
os.waitpid(child, 0)
""",
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
def test_no_process_hangs(monitor, ending):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + ending + "\nprint('done')"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
