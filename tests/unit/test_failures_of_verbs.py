"""Failures and ends on verbs: who is told, who is woken, and what is given back. Over a provider without a device."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import select
import shutil
import sys
import threading
import types

import pytest
from fake_verbs import opened
from kit.deadlines import DEADLINE_S
from kit.helpers import Replacing, wait_until
from racing import Elsewhere, Queue, play_sleep

import ndpy
from ndpy import Access, Flags, Status, platforms
from ndpy.objects.memory import buffer_range
from ndpy.platforms.verbs import adapter as verbs_adapter
from ndpy.platforms.verbs import adapter_info, allocation, completion_queue, native_calls
from ndpy.platforms.verbs.native_calls import lib
from ndpy.tools.doctor import linux, linux_drivers
from ndpy.tools.doctor.findings import Verdict
from ndpy.vocabulary import system_files

SERVER = ("127.0.0.1", 4791)


adapter = opened(windows=1)


# ---- memory, and allocations that fail ----


@pytest.mark.parametrize("alignment", [0, -1, -4096, 3, 6, 4097])
def test_an_alignment_is_a_power_of_two(alignment):
    with pytest.raises(ndpy.InvalidBufferError, match="power of two"):
        ndpy.alloc(1, alignment=alignment)
    assert len(ndpy.alloc(1, alignment=1)) == 1
    with pytest.raises(ndpy.InvalidBufferError, match="0 bytes"):
        ndpy.alloc(0)


def test_a_kernel_without_huge_pages_is_named_as_the_reason(monkeypatch):
    monkeypatch.setattr(allocation, "_memory_info", lambda name: 0)
    with pytest.raises(ndpy.UnsupportedError, match="no huge pages"):
        ndpy.alloc(1, huge_pages=True)


@pytest.mark.parametrize(
    ("limits", "length", "told"),
    [
        ((65536, 65536), 1 << 20, ["RLIMIT_MEMLOCK is 64 KiB", "memlock"]),
        ((65536, 1 << 20), 1 << 20, ["RLIMIT_MEMLOCK is 64 KiB", "may go to 1024 KiB"]),
        ((65536, resource.RLIM_INFINITY), 1 << 20, ["may go to unlimited"]),
        ((1 << 40, 1 << 40), 1 << 20, ["the adapter is short of memory"]),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1 << 20, ["is unlimited", "the adapter is short of memory"]),
    ],
)
def test_memory_that_cannot_be_pinned_is_explained_by_the_limit_or_not(
    fake, adapter, monkeypatch, limits, length, told
):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    fake.settings.reg_errno = errno.ENOMEM
    with pytest.raises(ndpy.InsufficientResourcesError) as caught:
        adapter.register(bytearray(length))
    assert [words for words in told if words not in str(caught.value)] == []
    if limits[0] == limits[1]:
        assert "may go to" not in str(caught.value)


def test_memory_without_an_owner_is_a_range_of_addresses():
    assert buffer_range(((1 << 64) - 16, 16), False)[1:] == ((1 << 64) - 16, 16)
    for wrong in ((0, 16), (16, 0), (16, -1), ((1 << 64) - 16, 17), (-1, 16), (16,), (16, "16")):
        with pytest.raises(ndpy.InvalidBufferError):
            buffer_range(wrong, False)


def test_a_queue_pair_that_the_provider_refuses_says_why(fake, adapter, queue):
    fake.failures.create_qp = errno.ENOMEM
    with pytest.raises(ndpy.InsufficientResourcesError, match="create queue pair"):
        adapter.create_queue_pair(queue)


# ---- adapters ----


@pytest.mark.parametrize("arguments", [{"provider": "x.dll"}, {"version": 1}, {"provider": "x.dll", "version": 1}])
def test_opening_looks_among_what_the_provider_serves(fake, adapter, monkeypatch, arguments):
    asked = []

    def list_adapters(**given):
        asked.append(given)
        return [adapter.info]

    monkeypatch.setattr(platforms, "list_adapters", list_adapters)
    with platforms.open_adapter("fake0", **arguments):
        pass
    assert asked == [{"provider": None, "version": None, **arguments}]


def test_the_adapter_of_the_environment_is_for_those_who_name_none(fake, adapter, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "other0")
    with pytest.raises(ndpy.AdapterNotFoundError, match="other0"):
        platforms.open_adapter()
    with pytest.raises(ndpy.AdapterNotFoundError, match="third0"):
        platforms.open_adapter("third0")
    platforms.open_adapter("fake0").close()
    monkeypatch.setenv("NDPY_ADAPTER", "")
    platforms.open_adapter().close()


def test_no_active_port_at_all_is_a_finding(fake, monkeypatch):
    def active_port():
        return [found.verdict for found in linux.examine_devices() if found.check == "active port"]

    monkeypatch.setattr(linux_drivers, "device_names", lambda: ["fake0"])
    with fake.open():
        assert active_port() == []
        fake.settings.port_down = 1
        assert active_port() == [Verdict.FAIL]


def test_the_doctor_of_one_adapter_leaves_the_others_out(fake, monkeypatch):
    """The other one cannot be opened, which is no finding about this one."""
    fake.have_address()
    monkeypatch.setattr(linux_drivers, "device_names", lambda: ["fake0", "broken0"])
    with fake.open() as adapter:
        names = {
            name: {found.check.split()[0] for found in linux.examine_devices(name)} - {"fork"}
            for name in ("fake0", "", "broken0", "none0", *adapter.info.addresses)
        }
        assert names.pop("") == {"fake0", "broken0"}
        assert (names.pop("broken0"), names.pop("none0")) == ({"broken0"}, set())
        assert set(names) == {"fake0", *adapter.info.addresses} and len(names) > 1
        assert all(found == {"fake0"} for found in names.values())


def test_a_library_is_told_with_its_folder_whatever_that_is_called(fake, tmp_path):
    folder = tmp_path / "a folder  of mine"
    folder.mkdir()
    path = shutil.copy(fake.path, folder / "libmine.so")
    ctypes.CDLL(str(path))
    assert linux._mapped("libmine.so") == str(path)
    assert linux._mapped("libnobodys.so") == "libnobodys.so"


def test_an_adapter_is_closed_at_once_although_a_cycle_keeps_what_was_dropped(fake):
    """A queue pair and its connector refer to each other, and the garbage collector is off."""
    fake.have_address()
    adapter = fake.open()
    queue = adapter.create_completion_queue(8)
    gc.disable()
    try:
        connector = adapter.connect(adapter.create_queue_pair(queue), SERVER, timeout_s=DEADLINE_S)
        thread = adapter._events._thread.ident
        wait_until(
            lambda: sys._current_frames()[thread].f_code.co_name == "_native_turn",
            "the adapter's thread is done with it",
        )
        with pytest.warns(ResourceWarning):
            del connector, queue
            adapter.close()
    finally:
        gc.enable()
    assert fake.counts.contexts == 0


def test_a_removal_reaches_the_protection_domains(fake):
    adapter = fake.open()
    domain = adapter.create_protection_domain()
    region, queue = domain.register(bytearray(64)), domain.create_completion_queue(4)
    armed = queue.arm()
    fake.remove(adapter)
    with pytest.raises(ndpy.DeviceRemovedError):
        armed.result(DEADLINE_S)
    for use in (lambda: domain.register(bytearray(64)), region.remote, queue.poll, adapter.create_protection_domain):
        with pytest.raises(ndpy.DeviceRemovedError):
            use()
    for thing in (region, queue, domain, adapter):
        thing.close()
    assert fake.counts.contexts == 0


def test_the_files_of_a_removed_device_are_let_go_with_the_adapter(fake, tmp_path):
    """The kernel waits for these files before it removes the device. librdmacm keeps its own files open."""
    fake.have_address()
    adapter = fake.open()
    files = fake.files_of_manager()
    with (tmp_path / "device").open("w") as device:
        for fd in files:
            os.dup2(device.fileno(), fd)
    fake.remove(adapter)
    wait_until(lambda: adapter._defunct is not None, "the removal is known")
    adapter.close()
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in files] == ["/dev/null"] * 2


# ---- completions ----


def test_each_waiter_that_takes_one_wakes_the_next(fake, adapter, monkeypatch):
    """Each waiter begins to sleep only when all before it are done.

    One event stands for all completions that came. One wake-up wakes one waiter.
    """
    gates: dict[threading.Thread, threading.Event] = {}

    def sleep(real, *arguments):
        assert gates[threading.current_thread()].wait(DEADLINE_S)
        return real(*arguments)

    play_sleep(monkeypatch, sleep)
    scene = Queue(fake, adapter, receives=3)
    waiters = [Elsewhere(lambda: scene.queue.wait(DEADLINE_S / 2, max_entries=1)) for _ in range(3)]
    for waiter in waiters:
        gates[waiter.thread] = threading.Event()
        waiter.start()
    wait_until(lambda: len(scene.queue._waiters) == 3, "all wait")
    for _ in range(3):
        scene.arrive()
    for context, waiter in enumerate(waiters):
        gates[waiter.thread].set()
        assert [completion.context for completion in waiter.result()] == [context]
    scene.close()


@pytest.fixture
def sleeper(queue):
    """Whether a thread that waits for the queue would be woken now."""
    waiter = queue._native_new_waiter()
    queue._waiters.append(waiter)
    yield lambda: bool(select.select([waiter], [], [], 0)[0])
    queue._waiters.remove(waiter)


@pytest.mark.parametrize("taker", ["the adapter's thread", "a waiting thread"])
def test_an_event_is_told_to_all_although_the_provider_fails(fake, adapter, queue, queue_pair, sleeper, taker):
    queue_pair.receive([])
    armed = queue.arm()
    if taker == "a waiting thread":
        adapter._events.forget(queue.fileno())
    fake.failures.poll = 2
    assert fake.complete(queue_pair)
    if taker == "a waiting thread":
        queue._on_event()
    assert isinstance(armed.exception(DEADLINE_S), ndpy.ProviderError)
    wait_until(sleeper, "the other thread is woken")
    assert len(queue.poll()) == 1


def test_an_event_whose_taker_is_interrupted_is_told_to_all(fake, adapter, queue, queue_pair, sleeper, monkeypatch):
    queue_pair.receive([])
    armed = queue.arm()
    adapter._events.forget(queue.fileno())
    assert fake.complete(queue_pair)

    def interrupted(channel):
        assert lib.ndpy_take_cq_events(channel) == 1
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(completion_queue, "lib", Replacing(lib, ndpy_take_cq_events=interrupted))
        with pytest.raises(KeyboardInterrupt):
            queue._on_event()
    assert sleeper()
    assert armed.done()
    assert len(queue.poll()) == 1


def test_a_queue_that_could_not_be_watched_once_can_be_armed_and_closed(fake, adapter, queue, queue_pair, monkeypatch):
    def full(fd, mask):
        raise OSError(errno.ENOSPC, "no watch is left")

    events = adapter._events
    with monkeypatch.context() as patch:
        patch.setattr(events, "_epoll", Replacing(events._epoll, register=full))
        with pytest.raises(OSError, match="no watch"):
            queue.arm()
    queue_pair.receive([])
    armed = queue.arm()
    assert fake.complete(queue_pair)
    assert armed.result(DEADLINE_S) is None


def test_a_waiter_hears_of_a_removal_although_the_queue_has_no_queue_pair(fake, adapter):
    queue = adapter.create_completion_queue(8)
    waiter = Elsewhere(queue.wait).start()
    wait_until(lambda: len(queue._waiters) == 1, "it waits")
    fake.remove(adapter)
    with pytest.raises(ndpy.DeviceRemovedError):
        waiter.result()
    queue.close()


def test_silent_requests_let_go_of_their_memory_with_the_next_that_is_not(fake, adapter, queue, queue_pair):
    with (
        adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S),
        adapter.register(bytearray(64), Access.LOCAL_WRITE) as region,
    ):
        for context in range(5):
            queue_pair.send(region[:8], context=context, flags=Flags.SILENT_SUCCESS if context < 4 else 0)
        while fake.complete(queue_pair, receive=False):
            pass
        assert [completion.context for completion in queue.wait(DEADLINE_S)] == [4]
        assert not queue_pair._posted_requests.initiator


def test_what_a_revocation_finds_is_told_to_a_waiter_whom_the_driver_does_not_tell(fake, adapter, queue, queue_pair):
    with (
        adapter.create_queue_pair(queue) as other,
        adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S),
        adapter.create_memory_window() as window,
        adapter.register(bytearray(64), Access.LOCAL_WRITE) as region,
    ):
        queue_pair.bind(window, region)
        assert fake.complete(queue_pair, receive=False)
        assert len(queue.wait(DEADLINE_S)) == 1
        other.receive([], context=7)
        waiter = Elsewhere(lambda: queue.wait(DEADLINE_S)).start()
        wait_until(lambda: len(queue._waiters) == 1, "it waits")
        fake.disarm(queue)
        assert fake.complete(other)
        revoking = Elsewhere(lambda: queue_pair._revoke(window)).start()
        wait_until(lambda: fake.complete(queue_pair, receive=False), "the invalidation is posted")
        assert revoking.result() is True
        assert [completion.context for completion in waiter.result()] == [7]


def test_a_poller_for_which_no_descriptor_is_left_ends_quietly(fake, monkeypatch, unraisable):
    def refuse(*_):
        raise OSError(errno.EMFILE, "too many files")

    with monkeypatch.context() as patch:
        patch.setattr(native_calls, "os", types.SimpleNamespace(**{**vars(os), "eventfd": refuse}))
        with pytest.raises(ndpy.InsufficientResourcesError, match="RLIMIT_NOFILE"):
            ndpy.Poller()
    gc.collect()
    assert unraisable == []


def test_a_poller_told_late_of_a_queue_that_it_has_no_more_leaves_it_alone(fake, queue, queue_pair):
    poller = ndpy.Poller()
    poller.add(queue)
    queue_pair.receive([], context=7)
    poller.remove(queue)
    assert fake.complete(queue_pair)
    # As if the poller had still been handling an event when the queue was removed.
    poller._mark_ready(queue)
    with pytest.raises(ndpy.TimeoutError):
        poller.wait(0)
    assert [completion.context for completion in queue.poll()] == [7]
    poller.add(queue)
    poller.close()
    poller._mark_ready(queue)


# ---- connections ----


@pytest.mark.parametrize("iwarp", [False, True])
@pytest.mark.parametrize("event", ["ADDR_ERROR", "ROUTE_ERROR", "UNREACHABLE"])
def test_the_queue_pair_of_an_attempt_that_failed_is_free_for_another(fake, iwarp, event):
    fake.have_address()
    if iwarp:
        fake.speak_iwarp()
    with fake.open_pair() as (adapter, _, queue_pair), adapter.create_connector() as first:
        fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_ADDR_RESOLVED
        attempt = first.begin_connect(queue_pair, SERVER)
        assert queue_pair.connector is first
        assert fake.connection_event(first, getattr(lib, f"RDMA_CM_EVENT_{event}"), -errno.EHOSTUNREACH)
        with pytest.raises(ndpy.NdpyError):
            attempt.result(DEADLINE_S)
        assert queue_pair.connector is None
        fake.connecting.silent = 0
        with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as second:
            assert queue_pair.connector is second


def test_a_request_that_fails_ends_the_connection_and_the_peer_is_told(fake, adapter, queue, queue_pair):
    with adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) as connector:
        queue_pair.receive([])
        assert fake.complete(queue_pair, status=lib.IBV_WC_LOC_PROT_ERR)
        assert len(queue.wait(DEADLINE_S)) == 1
        connector.wait_disconnected(DEADLINE_S)


@pytest.mark.parametrize("state", ["offered", "established"])
def test_closing_a_connector_ends_the_queue_pair_of_a_connection_and_not_of_an_offer(
    fake, adapter, queue, queue_pair, state
):
    queue_pair.receive([], context=7)
    with adapter.create_connector() as connector:
        connector.connect(queue_pair, SERVER, timeout_s=DEADLINE_S)
        if state == "established":
            connector.complete_connect(DEADLINE_S)
    assert queue_pair.connection_ended == (state == "established")
    assert queue_pair.connector is None
    ended = [(completion.context, completion.status) for completion in queue.poll()]
    assert ended == ([(7, Status.CANCELED)] if state == "established" else [])


# ---- other owners' objects, and missing ones ----


def test_objects_of_two_open_adapters_do_not_work_together(fake, adapter, queue, queue_pair):
    with (
        ndpy.open_adapter("fake0") as other,
        other.register(bytearray(8), Access.LOCAL_WRITE) as region,
        other.create_completion_queue(8) as foreign,
    ):
        for post in (lambda: queue_pair.receive(region[:]), lambda: queue_pair.receive([region])):
            with pytest.raises(ndpy.ForeignObjectError, match="fake0, opened separately"):
                post()
        for queues in ((foreign, None), (queue, foreign)):
            with pytest.raises(ndpy.ForeignObjectError):
                adapter.create_queue_pair(*queues)
    assert queue.poll() == []


def test_a_device_that_cannot_be_opened_says_why(fake, monkeypatch, tmp_path):
    file = tmp_path / "dev/infiniband/uverbs0"
    name = tmp_path / "sys/class/infiniband_verbs/uverbs0/ibdev"
    for made in (file, name):
        made.parent.mkdir(parents=True)
        made.touch(0o600)
    monkeypatch.setattr(system_files, "_root", tmp_path)
    name.write_text("fake0\n")
    assert str(adapter_info._open_error("fake0", errno.ENODEV)).startswith("ibv_open_device: fake0 cannot be opened: ")
    monkeypatch.setattr(system_files, "refusal", lambda place: OSError(errno.EACCES, "Permission denied"))
    refused = adapter_info._open_error("fake0", errno.EACCES)
    assert isinstance(refused, ndpy.PermissionError)
    assert "fake0 is /dev/infiniband/uverbs0, and it cannot be opened" in str(refused)
    assert f"by uid {os.geteuid()}: Permission denied (-rw-------)" in str(refused)
    assert str(tmp_path) not in str(refused)
    assert refused.native == errno.EACCES
    name.write_text("other0\n")
    assert "cannot be opened" in str(adapter_info._open_error("fake0", errno.EACCES))
    with pytest.raises(ndpy.AdapterNotFoundError, match="'gone0' has gone; there is fake0"):
        adapter_info.open_context("gone0")


def test_a_listener_tells_its_address_until_it_is_closed(adapter):
    listener = adapter.listen(("127.0.0.1", 0))
    assert listener.address[0] == "127.0.0.1"
    assert listener.address[1] > 0
    listener.close()
    with pytest.raises(ndpy.ClosedError):
        assert listener.address


def test_no_more_goes_from_a_cache_than_is_beyond_its_bounds(adapter):
    """Leases in use may exceed the bounds. An excess entry goes when it is released. The others stay."""
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=2) as cache:
        leases = [cache.local(bytearray(4096)) for _ in range(4)]
        assert cache.stats.entries == 4
        entries = []
        for lease in leases:
            lease.release()
            entries.append(cache.stats.entries)
        assert entries == [3, 2, 2, 2]
        assert cache.stats.evictions == 2


def test_the_release_of_what_was_invalidated_costs_no_other_its_place(adapter):
    buffers = [bytearray(4096) for _ in range(3)]
    with ndpy.RegistrationCache(adapter, max_bytes=3 * 4096, max_entries=3) as cache:
        lease = cache.local(buffers[0])
        for buffer in buffers[1:]:
            cache.local(buffer).release()
        cache.invalidate(buffers[0])
        lease.release()
        assert (cache.stats.entries, cache.stats.evictions) == (2, 0)


def test_a_device_that_cannot_be_used_keeps_nobody_from_the_others(fake, monkeypatch):
    """Some machines show a device that nobody can open. Whoever names it is told why."""
    names, open_context = adapter_info.device_names, adapter_info.open_context

    def opening(name):
        if name == "broken0":
            raise ndpy.PermissionError("broken0 may not be opened", operation="ibv_open_device", native=errno.EACCES)
        return open_context(name)

    monkeypatch.setattr(adapter_info, "device_names", lambda: ["broken0", *names()])
    monkeypatch.setattr(adapter_info, "open_context", opening)
    assert [info.name for info in ndpy.list_adapters()] == ["fake0"]
    for which in ("fake0", None):
        with ndpy.open_adapter(which) as adapter:
            assert adapter.info.name == "fake0"
    with pytest.raises(ndpy.PermissionError, match="broken0 may not be opened"):
        ndpy.open_adapter("broken0")
    with pytest.raises(ndpy.AdapterNotFoundError, match="no adapter 'other0'; there is fake0"):
        ndpy.open_adapter("other0")
    monkeypatch.setattr(adapter_info, "device_names", lambda: ["broken0"])
    with pytest.raises(ndpy.PermissionError, match="broken0 may not be opened"):
        ndpy.list_adapters()


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [
        (errno.ENOENT, ndpy.UnsupportedError, "docker run --device=/dev/infiniband/rdma_cm"),
        (errno.EPERM, ndpy.PermissionError, "docker run --device=/dev/infiniband/rdma_cm"),
        (errno.EACCES, ndpy.PermissionError, "udev rules"),
    ],
)
def test_a_container_without_the_connection_managers_file_says_so(fake, monkeypatch, tmp_path, number, error, words):
    info = platforms.find("fake0")
    (tmp_path / ".dockerenv").touch()
    monkeypatch.setattr(system_files, "_root", tmp_path)
    monkeypatch.setattr(system_files, "refusal", lambda place: OSError(number, os.strerror(number)))
    refusing = Replacing(lib, ndpy_create_event_channel=lambda library: native_calls.ffi.NULL)
    monkeypatch.setattr(verbs_adapter, "lib", refusing)
    with pytest.raises(error, match="connections need /dev/infiniband/rdma_cm") as caught:
        platforms.implementation().open_adapter(info)
    assert words in str(caught.value)
