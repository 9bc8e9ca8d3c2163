"""Features that only some verbs adapters have, over a fake provider that claims them.

They are rereg, on-demand paging, dma-buf, iWARP's read sinks, and memory that a forked child would take from the
adapter.
"""

from __future__ import annotations

import errno
import mmap
import threading
from typing import Any

import pytest
from kit import linux_only as linux_only
from kit.helpers import Replacing, interrupted, is_free
from ndpy._verbs import ffi, lib

import ndpy
from ndpy import Access, Capability, ndk
from ndpy.platforms.verbs import allocation, memory

LOCAL, READ, WRITE = lib.IBV_ACCESS_LOCAL_WRITE, lib.IBV_ACCESS_REMOTE_READ, lib.IBV_ACCESS_REMOTE_WRITE
BIND, ON_DEMAND = lib.IBV_ACCESS_MW_BIND, lib.IBV_ACCESS_ON_DEMAND
# IBV_ODP_SUPPORT and _IMPLICIT; send, receive, write and read of RC.
ODP = {"odp_general": 1, "odp_connected": 0xF}
IMPLICIT = {"odp_general": 3, "odp_connected": 0xF}
REREG = {"rereg_result": 0}
DMABUF = {"dmabuf_errno": 0}
IOVA = {"iova_errno": 0}


def address_of(buffer) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(buffer)))


# ---- claimed capabilities ----


@pytest.mark.parametrize(
    ("settings", "claimed"),
    [
        ({}, Capability.NONE),
        (REREG, Capability.REREGISTRATION),
        (ODP, Capability.ON_DEMAND_PAGING),
        (IMPLICIT, Capability.ON_DEMAND_PAGING | Capability.IMPLICIT_ON_DEMAND),
        ({"odp_general": 3, "odp_connected": 0x7}, Capability.NONE),
        ({"odp_general": 0, "odp_connected": 0xF}, Capability.NONE),
        (DMABUF, Capability.DMABUF),
        (IOVA, Capability.CHOSEN_ADDRESS),
        ({"null_regions": 1}, Capability.NULL_REGIONS),
    ],
    ids=str,
)
def test_the_capabilities_say_what_the_provider_has(fake, settings, claimed):
    with fake.open(**settings) as adapter:
        new = (
            Capability.REREGISTRATION
            | Capability.ON_DEMAND_PAGING
            | Capability.IMPLICIT_ON_DEMAND
            | Capability.DMABUF
            | Capability.CHOSEN_ADDRESS
            | Capability.NULL_REGIONS
        )
        assert adapter.info.capabilities & new == claimed


def test_an_adapter_that_claims_nothing_refuses_and_nothing_is_lost(fake):
    with fake.open() as adapter, adapter.register(bytearray(64)) as region:
        calls = fake.seen.calls
        token = region.local_token
        for refused, flag in (
            (lambda: region.reregister(access=Access.REMOTE_READ), "REREGISTRATION"),
            (adapter.register_implicit, "IMPLICIT_ON_DEMAND"),
            (lambda: adapter.register_dmabuf(0, 0, 4096, 0), "DMABUF"),
            (lambda: adapter.register(bytearray(64), Access.LOCAL_WRITE | Access.ON_DEMAND), "on-demand"),
            (lambda: adapter.begin_register(bytearray(1 << 20), Access.ON_DEMAND), "on-demand"),
        ):
            with pytest.raises(ndpy.UnsupportedError, match=flag):
                refused()
        assert fake.seen.calls == calls
        assert region.local_token == token
        assert region[0:8].length == 8


# ---- rereg ----


def test_a_region_gets_other_memory(fake):
    with fake.open(**REREG) as adapter:
        old, new = bytearray(64), bytearray(100)
        with adapter.register(old, Access.REMOTE_READ) as region:
            tokens = region.local_token, region.remote_token
            region.reregister(new)
            assert fake.seen.flags == lib.IBV_REREG_MR_CHANGE_TRANSLATION
            # libibverbs refuses access rights in a call that does not change them.
            assert (fake.seen.address, fake.seen.length, fake.seen.access) == (address_of(new), 100, 0)
            assert (region.buffer, region.address, region.length) == (new, address_of(new), 100)
            assert region.access == Access.REMOTE_READ
            assert (region.local_token, region.remote_token) != tokens
            assert region.remote(90).length == 10
            assert is_free(old)
            assert not is_free(new)
        assert is_free(new)


def test_a_region_gets_other_rights(fake):
    with fake.open(**REREG) as adapter:
        buffer = bytearray(64)
        with adapter.register(buffer) as region:
            region.reregister(access=Access.REMOTE_READ)
            assert fake.seen.flags == lib.IBV_REREG_MR_CHANGE_ACCESS
            assert (fake.seen.address, fake.seen.length, fake.seen.access) == (0, 0, READ)
            assert region.access == Access.REMOTE_READ
            assert region.remote().token == region.remote_token
            assert not is_free(buffer)


def test_a_region_gets_both_and_without_either_stays(fake):
    with fake.open(**REREG, windows=1) as adapter, adapter.register(bytearray(64)) as region:
        token = region.local_token
        region.reregister()
        assert region.local_token == token
        region.reregister(bytearray(10), Access.REMOTE_WRITE)
        assert fake.seen.flags == lib.IBV_REREG_MR_CHANGE_ACCESS | lib.IBV_REREG_MR_CHANGE_TRANSLATION
        assert fake.seen.access == LOCAL | WRITE | BIND
        assert (region.length, region.access) == (10, Access.REMOTE_WRITE)


def test_a_region_moves_to_another_protection_domain(fake):
    with fake.open(**REREG) as adapter:
        buffer = bytearray(64)
        region = adapter.register(buffer, Access.REMOTE_READ)
        with adapter.create_protection_domain() as domain:
            tokens = region.local_token, region.remote_token
            region.reregister(domain=domain)
            assert (fake.seen.flags, fake.seen.moved) == (lib.IBV_REREG_MR_CHANGE_PD, 1)
            assert (region.adapter, region.buffer, region.access) == (domain, buffer, Access.REMOTE_READ)
            assert (region.local_token, region.remote_token) != tokens
            with pytest.raises(ndpy.DeviceBusyError, match="MemoryRegion"):
                domain.close()
            # Both at once, and back again.
            region.reregister(access=Access.LOCAL_WRITE, domain=adapter)
            assert fake.seen.flags == lib.IBV_REREG_MR_CHANGE_PD | lib.IBV_REREG_MR_CHANGE_ACCESS
            assert region.adapter is adapter
            fake.seen.flags = -1
            region.reregister(domain=adapter)
            assert fake.seen.flags == -1
        with pytest.raises(ndpy.DeviceBusyError, match="MemoryRegion"):
            adapter.close()
        region.close()


def test_a_region_that_moved_and_was_dropped_goes_with_its_domain(fake):
    """The fixture looks whether all of it has gone."""
    with fake.open(**REREG) as adapter, adapter.create_protection_domain() as domain:
        adapter.register(bytearray(8)).reregister(domain=domain)


def test_a_region_moves_to_no_domain_of_another_adapter_and_to_no_closed_one(fake):
    with fake.open(**REREG) as adapter, fake.open() as other, adapter.register(bytearray(8)) as region:
        domain = adapter.create_protection_domain()
        domain.close()
        with pytest.raises(ndpy.ForeignObjectError, match="protection domain"):
            region.reregister(domain=other)
        with pytest.raises(ndpy.ClosedError):
            region.reregister(domain=domain)
        fake.settings.rereg_result = lib.IBV_REREG_MR_ERR_INPUT
        with adapter.create_protection_domain() as usable, pytest.raises(ndpy.NdpyError):
            region.reregister(domain=usable)
        assert region.adapter is adapter


def test_what_cannot_be_registered_leaves_the_region_as_it_was(fake):
    with fake.open(**REREG) as adapter, adapter.register(bytes(64), Access.NONE) as region:
        before = region.local_token, region.length, region.access
        for arguments, error in (
            ((b"",), ndpy.InvalidBufferError),
            ((b"constant", Access.LOCAL_WRITE), ndpy.AccessViolationError),
            ((None, Access.LOCAL_WRITE), ndpy.AccessViolationError),
            ((None, 0x400), ndpy.InvalidFlagsError),
            (((4096, adapter.info.max_registration_size + 1),), ndpy.LimitExceededError),
        ):
            with pytest.raises(error):
                region.reregister(*arguments)
            assert (region.local_token, region.length, region.access) == before


@pytest.mark.parametrize("result", ["INPUT", "DONT_FORK_NEW"])
def test_a_refused_rereg_leaves_the_region_as_it_was(fake, result):
    """ibv_rereg_mr(3): the old region is still valid."""
    with fake.open(**REREG) as adapter:
        old, new = bytearray(64), bytearray(100)
        with adapter.register(old) as region:
            fake.settings.rereg_result = getattr(lib, f"IBV_REREG_MR_ERR_{result}")
            fake.settings.rereg_errno = errno.ENOMEM
            with pytest.raises(ndpy.InsufficientResourcesError) as raised:
                region.reregister(new)
            assert raised.value.native == errno.ENOMEM
            assert (region.buffer, region.length) == (old, 64)
            assert region[0:64].address == address_of(old)
            assert not is_free(old)
            del raised
            assert is_free(new)


def test_a_rereg_that_fails_to_let_children_have_the_old_memory_has_succeeded(fake):
    """IBV_REREG_MR_ERR_DO_FORK_OLD: the new region is valid."""
    with fake.open(**REREG) as adapter, adapter.register(bytearray(64)) as region:
        fake.settings.rereg_result = lib.IBV_REREG_MR_ERR_DO_FORK_OLD
        region.reregister(bytearray(100))
        assert region.length == 100


@pytest.mark.parametrize("result", ["CMD", "CMD_AND_DO_FORK_NEW"])
def test_a_rereg_that_fails_in_the_adapter_leaves_a_region_that_can_only_be_closed(fake, result):
    """ibv_rereg_mr(3): the region must not be used, but it must still be deregistered."""
    with fake.open(**REREG) as adapter:
        old, new = bytearray(64), bytearray(100)
        region = adapter.register(old, Access.REMOTE_READ)
        fake.settings.rereg_result = getattr(lib, f"IBV_REREG_MR_ERR_{result}")
        fake.settings.rereg_errno = errno.EFAULT
        with pytest.raises(ndpy.AccessViolationError):
            region.reregister(new)
        for use in (region.remote, lambda: region.reregister(bytearray(8))):
            with pytest.raises(ndpy.ProviderError, match="close it and make a new one"):
                use()
        # The adapter may still use either buffer.
        assert not is_free(old)
        assert not is_free(new)
        assert fake.seen.registered == 1
        region.close()
        assert fake.seen.registered == 0
        assert is_free(old)
        assert is_free(new)


def test_a_region_that_can_only_be_closed_stays_so_if_that_fails(fake, monkeypatch):
    with fake.open(**REREG) as adapter:
        region = adapter.register(bytearray(64), Access.REMOTE_READ)
        fake.settings.rereg_result = lib.IBV_REREG_MR_ERR_CMD
        with pytest.raises(ndpy.ProviderError):
            region.reregister(bytearray(100))
        with monkeypatch.context() as patch:
            patch.setattr(memory, "lib", Replacing(lib, ibv_dereg_mr=lambda native: errno.EBUSY))
            with pytest.raises(ndpy.ProviderError):
                region.deregister()
        with pytest.raises(ndpy.ProviderError, match="close it and make a new one"):
            region.remote()
        region.close()


@pytest.mark.parametrize("how", ["_release", "deregister"])
def test_ctrl_c_in_deregistering_leaves_a_region_that_can_be_closed(fake, monkeypatch, how):
    def interrupted(native: Any) -> int:
        lib.ibv_dereg_mr(native)
        raise KeyboardInterrupt

    buffer = bytearray(64)
    with fake.open() as adapter:
        region = adapter.register(buffer)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "lib", Replacing(lib, ibv_dereg_mr=interrupted))
            with pytest.raises(KeyboardInterrupt):
                getattr(region, how)()
        region.close()
        assert fake.seen.registered == 0
        assert is_free(buffer)


# ---- on demand ----


def test_memory_is_registered_on_demand(fake):
    with fake.open(**ODP) as adapter:
        with adapter.register(bytearray(64), Access.REMOTE_WRITE | Access.ON_DEMAND) as region:
            assert fake.seen.access == LOCAL | WRITE | ON_DEMAND
            assert region.access == Access.REMOTE_WRITE | Access.ON_DEMAND
        with pytest.raises(ndpy.UnsupportedError, match="IMPLICIT"):
            adapter.register_implicit()


def test_memory_on_demand_goes_without_windows_where_they_need_it_pinned(fake):
    with fake.open(**ODP, windows=1) as adapter:
        with adapter.register(bytearray(64), Access.LOCAL_WRITE | Access.ON_DEMAND):
            assert fake.seen.access == LOCAL | BIND | ON_DEMAND
        fake.settings.reg_errno_windows = errno.EOPNOTSUPP
        with adapter.register(bytearray(64), Access.LOCAL_WRITE | Access.ON_DEMAND):
            assert fake.seen.access == LOCAL | ON_DEMAND
        with pytest.raises(ndpy.UnsupportedError):
            adapter.register(bytearray(64))


def test_an_implicit_region_is_all_memory_by_its_addresses(fake):
    with fake.open(**IMPLICIT, windows=1) as adapter:
        with adapter.register_implicit(Access.REMOTE_READ) as region:
            assert (fake.seen.address, fake.seen.length) == (0, (1 << 64) - 1)
            assert fake.seen.access == READ | ON_DEMAND
            assert (region.address, region.length, region.buffer) == (0, (1 << 64) - 1, None)
            buffer = bytearray(100)
            address = address_of(buffer)
            element = region[address : address + 100]
            assert (element.address, element.length, element.token) == (address, 100, region.local_token)
            remote = region.remote(address, 100)
            assert (remote.address, remote.length, remote.token) == (address, 100, region.remote_token)
        with adapter.register_implicit() as region:
            assert fake.seen.access == LOCAL | ON_DEMAND


# ---- dma-buf ----


def test_memory_of_a_device_is_registered_by_its_descriptor(fake):
    with fake.open(**DMABUF) as adapter:
        with adapter.register_dmabuf(7, 4096, 8192, 0x10000, Access.REMOTE_WRITE) as region:
            seen = fake.seen
            assert (seen.fd, seen.offset, seen.length, seen.address) == (7, 4096, 8192, 0x10000)
            assert seen.access == LOCAL | WRITE
            assert (region.address, region.length, region.buffer) == (0x10000, 8192, None)
            assert region[0:16].address == 0x10000
            assert region.remote(8000, 192).address == 0x10000 + 8000
        with pytest.raises(ndpy.ProviderError) as raised:
            adapter.register_dmabuf(-1, 0, 4096, 0)
        assert raised.value.native == errno.EBADF
        for offset, length, iova in ((0, 0, 0), (-1, 4096, 0), (0, 4096, -1), (0, 4096, (1 << 64) - 1)):
            with pytest.raises(ndpy.InvalidBufferError):
                adapter.register_dmabuf(7, offset, length, iova)


def test_a_region_without_buffer_is_not_registered_again(fake):
    with fake.open(**DMABUF, **REREG) as adapter, adapter.register_dmabuf(7, 0, 4096, 0) as region:
        with pytest.raises(ndpy.UnsupportedError, match="buffer"):
            region.reregister(bytearray(64))
        assert region[0:8].length == 8


# ---- sinks of reads ----


def test_j_11_on_iwarp_a_sink_gets_the_right_that_the_answer_needs(fake):
    """The answer to a read is a write to the sink's remote token (RFC 5040)."""
    fake.speak_iwarp()
    with fake.open() as adapter:
        assert Capability.READ_SINK_REQUIRED in adapter.info.capabilities
        with adapter.register(bytearray(64), Access.LOCAL_WRITE | Access.READ_SINK) as region:
            assert fake.seen.access == LOCAL | WRITE
            # Even so, peers have no right to it.
            with pytest.raises(ndpy.AccessViolationError):
                region.remote()
        with adapter.register(bytearray(64)):
            assert fake.seen.access == LOCAL


@pytest.mark.parametrize(("iwarp", "native"), [(True, LOCAL | WRITE), (False, LOCAL)])
def test_j_11_a_sink_in_device_memory_has_the_rights_of_its_transport(fake, iwarp, native):
    if iwarp:
        fake.speak_iwarp()
    with fake.open(**DMABUF) as adapter, adapter.register_dmabuf(7, 0, 4096, 0, Access.READ_SINK):
        assert fake.seen.access == native


def test_j_12_elsewhere_a_sink_is_memory_like_other(fake):
    with fake.open() as adapter:
        assert Capability.READ_SINK_REQUIRED not in adapter.info.capabilities
        with adapter.register(bytearray(64), Access.LOCAL_WRITE | Access.READ_SINK):
            assert fake.seen.access == LOCAL


# ---- fork ----


@pytest.mark.parametrize(("length", "alignment"), [(1, 1), (100, 64), (mmap.PAGESIZE, 4 * mmap.PAGESIZE)])
def test_allocated_memory_has_the_length_and_the_alignment_that_were_asked_for(length, alignment):
    memory = ndpy.alloc(length, alignment=alignment)
    assert len(memory) == length
    assert address_of(memory) % alignment == 0


def test_a_single_byte_that_python_does_not_own_can_be_registered(fake):
    memory = ndpy.alloc(64)
    with fake.open() as adapter:
        with adapter.register((address_of(memory), 1)) as region:
            assert region.length == 1
        with pytest.raises(ndpy.InvalidBufferError):
            adapter.register((address_of(memory), 0))


def is_kept_from_children(view: memoryview) -> bool:
    """Whether the mapping has MADV_DONTFORK. /proc/self/smaps shows it as "dc"."""
    address = address_of(view)
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first = line.split(maxsplit=1)[0]
            if "-" in first and not first.endswith(":"):
                start, stop = (int(part, 16) for part in first.split("-"))
                inside = start <= address < stop
            elif inside and first == "VmFlags:":
                return "dc" in line.split()
    raise AssertionError("the mapping is not there")


@pytest.mark.parametrize(
    ("status", "kept"), [("IBV_FORK_UNNEEDED", False), ("IBV_FORK_ENABLED", False), ("IBV_FORK_DISABLED", True)]
)
def test_allocated_memory_is_kept_from_children_where_they_would_endanger_it(fake, monkeypatch, status, kept):
    # With --adapter soft0 the libraries are softverbs, which pins nothing.
    monkeypatch.setattr(allocation, "softverbs_only", lambda: False)
    fake.settings.fork_status = getattr(lib, status)
    assert is_kept_from_children(ndpy.alloc(3 * mmap.PAGESIZE)) is kept


def test_memory_can_be_allocated_without_rdma_libraries(monkeypatch):
    from ndpy.platforms.verbs import native_calls

    monkeypatch.setattr(native_calls, "_loaded", False)
    monkeypatch.setenv("NDPY_LIBIBVERBS", "/nonexistent")
    assert not is_kept_from_children(ndpy.alloc(64))
    monkeypatch.undo()


@pytest.mark.parametrize("step", ["register", "deregister"])
def test_an_ndk_region_can_be_used_after_ctrl_c(fake, monkeypatch, step):
    """The chain of MDLs is free again, too."""

    def unused(context: object, status: ndk.NtStatus) -> None:
        raise AssertionError((context, status))

    with fake.open() as adapter, ndk.NdkMr(adapter) as mr:
        mdl, ended = ndk.Mdl(bytearray(4096)), threading.Event()
        if step == "register":
            with monkeypatch.context() as patch:
                patch.setattr(adapter, "begin_register", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    mr.register(mdl, 4096, 0, unused)
            mdl.next = None
        if mr.register(mdl, 4096, 0, lambda *_: ended.set()) == ndk.NtStatus.PENDING:
            assert ended.wait(20)
        assert mr.region is not None
        if step == "deregister":
            with monkeypatch.context() as patch:
                patch.setattr(mr.region, "begin_deregister", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    mr.deregister(unused)
        ended.clear()
        if mr.deregister(lambda *_: ended.set()) == ndk.NtStatus.PENDING:
            assert ended.wait(20)
        assert mr.region is None


def test_the_provider_gets_the_chosen_address(fake):
    with fake.open(**IOVA, windows=1) as adapter:
        memory = ndpy.alloc(8192)
        with adapter.register_at(memory, 0x10000, Access.REMOTE_WRITE | Access.RELAXED_ORDERING) as region:
            assert fake.seen.address == region.remote().address == 0x10000
            assert fake.seen.access == LOCAL | WRITE | BIND | lib.IBV_ACCESS_RELAXED_ORDERING
        fake.settings.reg_errno = errno.ENOMEM
        with pytest.raises(ndpy.InsufficientResourcesError, match="RLIMIT_MEMLOCK"):
            adapter.register_at(memory, 0)
        fake.settings.reg_errno = 0


def test_no_address_is_chosen_where_the_provider_refuses(fake):
    with fake.open() as adapter, pytest.raises(ndpy.UnsupportedError, match="CHOSEN_ADDRESS"):
        adapter.register_at(bytearray(64), 0)


def test_prefetching_asks_for_the_pages_of_the_part(fake):
    with (
        fake.open(**ODP) as adapter,
        adapter.register(bytearray(8192), Access.LOCAL_WRITE | Access.ON_DEMAND) as region,
    ):
        fake.seen.length = 0
        region.prefetch(100, 200)
        assert (fake.seen.address, fake.seen.length) == (region.address + 100, 200)
        assert (fake.seen.access, fake.seen.flags) == (lib.IBV_ADVISE_MR_ADVICE_PREFETCH, lib.IBV_ADVISE_MR_FLAG_FLUSH)
        region.prefetch(write=True)
        assert (fake.seen.length, fake.seen.access) == (8392, lib.IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE)
        with pytest.raises(ndpy.ElementRangeError):
            region.prefetch(8000, 200)
        for number, kind in (
            (errno.EOPNOTSUPP, ndpy.UnsupportedError),
            (errno.EFAULT, ndpy.AccessViolationError),
            (errno.EBUSY, ndpy.ProviderError),
        ):
            fake.settings.advise_errno = number
            with pytest.raises(kind):
                region.prefetch()
    with pytest.raises(ndpy.ClosedError):
        region.prefetch()


def test_pinned_memory_needs_no_prefetching(fake):
    with fake.open(advise_errno=errno.EINVAL) as adapter, adapter.register(bytearray(64)) as region:
        region.prefetch()
        with pytest.raises(ndpy.ElementRangeError):
            region.prefetch(65, 1)


def test_much_memory_is_prefetched_in_parts(fake):
    with fake.open(**IMPLICIT) as adapter, adapter.register_implicit() as region:
        fake.seen.length = 0
        region.prefetch(1 << 32, 3 << 30)
        assert (fake.seen.address, fake.seen.length) == ((1 << 32) + (2 << 30), 3 << 30)


def test_a_null_region_has_elements_of_any_length_and_nothing_for_peers(fake):
    with fake.open(null_regions=1) as adapter, adapter.register_null() as region:
        assert (region.address, region.buffer) == (0, None)
        assert region[0 : 1 << 20].length == 1 << 20
        with pytest.raises(ndpy.AccessViolationError):
            region.remote()
        with pytest.raises(ndpy.DeviceBusyError):
            adapter.close()
    assert fake.seen.registered == 0
    with fake.open(null_regions=0) as adapter, pytest.raises(ndpy.UnsupportedError, match="NULL_REGIONS"):
        adapter.register_null()


# ---- sent inline ----


@pytest.mark.parametrize("listed", [False, True], ids=["an element", "a list"])
@pytest.mark.parametrize("kind", ["dma-buf", "chosen address", "null"])
def test_what_is_not_at_the_addresses_of_its_elements_is_not_sent_inline(fake, kind, listed):
    """The provider's library would read at these addresses, and the process would crash."""
    make = {
        "dma-buf": lambda: adapter.register_dmabuf(7, 0, 4096, 0x10000),
        "chosen address": lambda: adapter.register_at(ndpy.alloc(4096), 0),
        "null": lambda: adapter.register_null(),
    }[kind]
    with (
        fake.open(**DMABUF, **IOVA, null_regions=1) as adapter,
        adapter.create_completion_queue(8) as queue,
        adapter.create_queue_pair(queue, inline_data_size=64, max_initiator_sge=2) as queue_pair,
        make() as region,
    ):
        elements = [region[0:8], region[8:16]] if listed else region[0:8]
        remote = ndpy.RemoteMemory(0x1000, 64, 1)
        for post in (queue_pair.send, lambda *args, **rest: queue_pair.write(args[0], remote, **rest)):
            with pytest.raises(ndpy.InvalidBufferError, match=r"send it without Flags\.INLINE"):
                post(elements, flags=ndpy.Flags.INLINE)
        batch = ndpy.Batch(4, max_sge=2)
        with pytest.raises(ValueError, match=r"send it without Flags\.INLINE"):
            batch.send(elements, flags=ndpy.Flags.INLINE)
        assert len(batch) == 0
        batch.send(elements)
