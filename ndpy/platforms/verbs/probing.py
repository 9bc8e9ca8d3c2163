"""What an adapter can do beyond what its attributes say: most of it is tried."""

from __future__ import annotations

import contextlib
import errno
import mmap
from collections.abc import Iterator
from typing import Any, NamedTuple

from ndpy.platforms.verbs.native_calls import check, ffi, free_region, has_symbol, lib, load_for
from ndpy.vocabulary.flags import Capability


class Probed(NamedTuple):
    """Properties that verbs does not report. inline_size is the largest inline size that a queue pair can have."""

    inline_size: int
    capabilities: Capability


_probed: dict[tuple[str, int], Probed] = {}


@contextlib.contextmanager
def _completion_queue(context: Any) -> Iterator[Any]:
    """A completion queue to try things with. NULL if there can be none."""
    queue = lib.ibv_create_cq(context, 1, ffi.NULL, ffi.NULL, 0)
    try:
        yield queue
    finally:
        if queue != ffi.NULL:
            lib.ibv_destroy_cq(queue)


def probe(context: Any, name: str, attributes: Any) -> Probed:
    """Find out by trying, once for each device."""
    key = name, int(attributes.node_guid)
    if key not in _probed:
        domain = lib.ibv_alloc_pd(context)
        if domain == ffi.NULL:
            return Probed(0, Capability.NONE)
        try:
            inline = _probe_inline(context, domain)
            capabilities = _probe_registration(domain, load_for(name)) | _probe_types(context, domain)
            capabilities |= _probe_extended_queues(context)
            if inline:
                capabilities |= Capability.INLINE
            _probed[key] = Probed(inline, capabilities)
        finally:
            lib.ibv_dealloc_pd(domain)
    return _probed[key]


def _probe_registration(domain: Any, library: int) -> Capability:
    """Try whether a region's rights can be changed, whether it can have any address, and whether dma-bufs are
    supported.

    If they are, a bad descriptor gives EBADF.
    """
    found = Capability.NONE
    with mmap.mmap(-1, mmap.PAGESIZE) as page, ffi.from_buffer(page) as start:
        region = lib.ibv_reg_mr(domain, start, mmap.PAGESIZE, lib.IBV_ACCESS_LOCAL_WRITE)
        if region != ffi.NULL:
            change = lib.IBV_REREG_MR_CHANGE_ACCESS
            if not lib.ibv_rereg_mr(region, change, ffi.NULL, ffi.NULL, 0, 0):
                found |= Capability.REREGISTRATION
            _free(region)
        if has_symbol(b"ibv_reg_mr_iova2", library):
            # Libraries with this function know the rights that an adapter may ignore.
            found |= Capability.RELAXED_ORDERING
            region = lib.ibv_reg_mr_iova2(domain, start, mmap.PAGESIZE, 0, lib.IBV_ACCESS_LOCAL_WRITE)
            if region != ffi.NULL:
                found |= Capability.CHOSEN_ADDRESS
                _free(region)
    out = ffi.new("struct ndpy_registration *")
    if not lib.ndpy_register_null(domain, out):
        found |= Capability.NULL_REGIONS
        _free(ffi.cast("struct ibv_mr *", out.region))
    if has_symbol(b"ibv_reg_dmabuf_mr", library):
        region = lib.ibv_reg_dmabuf_mr(domain, 0, mmap.PAGESIZE, 0, -1, lib.IBV_ACCESS_LOCAL_WRITE)
        if region != ffi.NULL:
            _free(region)
        elif ffi.errno == errno.EBADF:
            found |= Capability.DMABUF
    return found


def _free(region: Any) -> None:
    check("open adapter", free_region(region))


def _probe_extended_queues(context: Any) -> Capability:
    """Try what completion queues can be created by the extended call, and whether the clock can be read."""
    kinds = {
        (lib.NDPY_TIMESTAMP, 0): Capability.TIMESTAMPS,
        (lib.NDPY_WALL_CLOCK, 0): Capability.WALL_CLOCK_TIMESTAMPS,
        (lib.NDPY_FLOW_TAG, 0): Capability.FLOW_TAGS,
        (0, 1): Capability.SINGLE_THREADED_QUEUES,
    }
    found = Capability.NONE
    for (details, single_threaded), capability in kinds.items():
        queue = lib.ndpy_create_extended_queue(context, 1, ffi.NULL, ffi.NULL, details, single_threaded)
        if queue != ffi.NULL:
            found |= capability
            lib.ibv_destroy_cq(queue)
    if lib.ndpy_device_memory_size(context):
        found |= Capability.DEVICE_MEMORY
    if not lib.ndpy_query_clock(context, ffi.new("struct ndpy_clock *")):
        found |= Capability.CLOCK
    return found


def _probe_types(context: Any, domain: Any) -> Capability:
    """Try which queue pairs can be created."""
    found = Capability.NONE
    with _completion_queue(context) as queue:
        if queue == ffi.NULL:
            return found
        types = {
            lib.IBV_QPT_RC: Capability.RELIABLE_CONNECTIONS,
            lib.IBV_QPT_UC: Capability.UNRELIABLE_CONNECTIONS,
            lib.IBV_QPT_UD: Capability.DATAGRAMS,
        }
        for kind, capability in types.items():
            if _try_to_create(domain, queue, 0, kind) is not None:
                found |= capability
        if (domain_of_xrc := lib.ndpy_open_xrc_domain(context, -1)) != ffi.NULL:
            found |= Capability.XRC
            lib.ndpy_close_xrc_domain(domain_of_xrc)
        return found | _newer_operations(context, domain, queue)


def _probe_inline(context: Any, domain: Any) -> int:
    """Return the largest inline size that a queue pair can have."""
    with _completion_queue(context) as queue:
        if queue == ffi.NULL:
            return 0
        low, high = 0, 4096
        while low < high:
            size = (low + high + 1) // 2
            granted = _try_to_create(domain, queue, size)
            if granted is None:
                high = size - 1
            else:
                low = max(size, min(granted, high))
        return low


def _newer_operations(context: Any, domain: Any, queue: Any) -> Capability:
    """Try for which operations beyond those of ibv_post_send(3) queue pairs can be created."""
    said = lib.ndpy_newer_operations(context)
    kinds = {
        Capability.ATOMIC_WRITE: (lib.NDPY_CAN_WRITE_ATOMICALLY, lib.NDPY_WITH_ATOMIC_WRITE),
        Capability.FLUSH: (lib.NDPY_CAN_FLUSH_GLOBALLY, lib.NDPY_WITH_FLUSH),
        Capability.FLUSH_PERSISTENT: (lib.NDPY_CAN_FLUSH_PERSISTENTLY, lib.NDPY_WITH_FLUSH),
    }
    found = Capability.NONE
    for capability, (bit, operations) in kinds.items():
        if said & bit and _try_to_create(domain, queue, 0, operations=operations) is not None:
            found |= capability
    return found


def _try_to_create(domain: Any, queue: Any, size: int, kind: int = lib.IBV_QPT_RC, operations: int = 0) -> int | None:
    """Create a queue pair and destroy it. Returns the inline size that it has, or None if it cannot be created."""
    request = ffi.new("struct ibv_qp_init_attr *")
    request.send_cq = request.recv_cq = queue
    request.qp_type = kind
    request.cap.max_send_wr = request.cap.max_recv_wr = 1
    request.cap.max_send_sge = request.cap.max_recv_sge = 1
    request.cap.max_inline_data = size
    if operations:
        queue_pair = lib.ndpy_create_queue_pair(domain, request, operations)
    else:
        queue_pair = lib.ibv_create_qp(domain, request)
    if queue_pair == ffi.NULL:
        return None
    lib.ibv_destroy_qp(queue_pair)
    return int(request.cap.max_inline_data)


def resizing(context: Any) -> Capability:
    """Try whether a completion queue can be resized."""
    with _completion_queue(context) as queue:
        failed = queue == ffi.NULL or lib.ibv_resize_cq(queue, 16)
    return Capability.NONE if failed else Capability.RESIZE_COMPLETION_QUEUE


def on_demand(context: Any) -> Capability:
    general, connected = ffi.new("uint64_t *"), ffi.new("uint32_t *")
    wanted = lib.IBV_ODP_SUPPORT_SEND | lib.IBV_ODP_SUPPORT_RECV | lib.IBV_ODP_SUPPORT_WRITE | lib.IBV_ODP_SUPPORT_READ
    if lib.ndpy_query_on_demand(context, general, connected) or not general[0] & lib.IBV_ODP_SUPPORT:
        return Capability.NONE
    if connected[0] & wanted != wanted:
        return Capability.NONE
    implicit = general[0] & lib.IBV_ODP_SUPPORT_IMPLICIT
    return Capability.ON_DEMAND_PAGING | (Capability.IMPLICIT_ON_DEMAND if implicit else Capability.NONE)
