"""One Python API for RDMA adapters: memory, windows, queue pairs, completions and connections."""

from typing import TYPE_CHECKING, Any

try:
    from ndpy import _core as _core

    if not _core.is_main_interpreter():
        raise ImportError("this is a subinterpreter")
except ImportError as error:
    raise ImportError(
        "ndpy works in the main interpreter only, because all of a process shares its adapters; use threads, or processes that are "
        "started by the 'spawn' method"
        if "subinterpreter" in str(error)
        else f"ndpy's extension module is missing ({error}); install ndpy with pip, or run `python setup.py build_ext --inplace` "
        "in a checkout"
    ) from None

from ndpy._core import Batch, CompletionArray
from ndpy.adapter import Adapter
from ndpy.buffer import Buffer, alloc
from ndpy.clock import DeviceClock
from ndpy.completion import Completion
from ndpy.completion_queue import CompletionQueue
from ndpy.connection import Connector
from ndpy.connection_parameters import ReadLimits, RetryPolicy
from ndpy.datagram import DatagramSource
from ndpy.datagram_listener import DatagramListener
from ndpy.datagram_queue_pair import MANAGER_QKEY, DatagramQueuePair, Destination
from ndpy.device_memory import DeviceMemory
from ndpy.endpoint import Endpoint
from ndpy.errors import (
    AccessViolationError,
    AdapterNotFoundError,
    AddressInUseError,
    AddressUnreachableError,
    CanceledError,
    ClosedError,
    CompletionQueueOverrunError,
    ConnectionActiveError,
    DeviceBusyError,
    DeviceRemovedError,
    ElementRangeError,
    ForeignObjectError,
    InsufficientResourcesError,
    InvalidBufferError,
    InvalidFlagsError,
    LimitExceededError,
    NdpyError,
    NotConnectedError,
    ProviderError,
    ProviderNotFoundError,
    QueueFullError,
    QueuePairAttributesError,
    UnsupportedError,
)
from ndpy.errors import ConnectionAbortedError as ConnectionAbortedError
from ndpy.errors import ConnectionRefusedError as ConnectionRefusedError
from ndpy.errors import PermissionError as PermissionError
from ndpy.errors import TimeoutError as TimeoutError
from ndpy.events import AdapterEvent, EventKind, EventStream
from ndpy.flags import Access, Capability, CompletionDetails, Flags, FlushKind, Notify, Operation, Status
from ndpy.info import AdapterInfo, Gid, NetworkInterface, PathInfo, PortInfo
from ndpy.listener import Listener
from ndpy.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.multicast_group import MulticastGroup
from ndpy.pending import Pending
from ndpy.platforms import list_adapters, open_adapter
from ndpy.poller import Poller
from ndpy.protection_domain import ProtectionDomain
from ndpy.queue_pair import QueuePair
from ndpy.queue_pair_attributes import (
    AddressVector,
    AlternatePath,
    PathMigration,
    QueuePairAttributes,
    QueuePairState,
    QueuePairType,
)
from ndpy.shared_receive_queue import SharedReceiveQueue
from ndpy.work_queues import QueuePairLimits
from ndpy.xrc import XrcDestination, XrcDomain, XrcReceiveQueue, XrcReceiver, XrcSender

if TYPE_CHECKING:
    from ndpy import aio as aio
    from ndpy.cache.lease import CacheStats, Exposure, Lease
    from ndpy.cache.registration_cache import RegistrationCache

__version__ = "0.1.0"

# Imported when they are asked for, because most programs do without the cache and without asyncio.
_OF_THE_CACHE = {
    "CacheStats": "cache.lease",
    "Exposure": "cache.lease",
    "Lease": "cache.lease",
    "RegistrationCache": "cache.registration_cache",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "aio":
        return importlib.import_module("ndpy.aio")
    module = _OF_THE_CACHE.get(name)
    if module is None:
        raise AttributeError(f"module 'ndpy' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"ndpy.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_OF_THE_CACHE, "aio"})


# Without the errors that have a builtin's name, so that `from ndpy import *` hides none.
__all__ = [
    "MANAGER_QKEY",
    "Access",
    "AccessViolationError",
    "Adapter",
    "AdapterEvent",
    "AdapterInfo",
    "AdapterNotFoundError",
    "AddressInUseError",
    "AddressUnreachableError",
    "AddressVector",
    "AlternatePath",
    "Batch",
    "Buffer",
    "CacheStats",
    "CanceledError",
    "Capability",
    "ClosedError",
    "Completion",
    "CompletionArray",
    "CompletionDetails",
    "CompletionQueue",
    "CompletionQueueOverrunError",
    "ConnectionActiveError",
    "Connector",
    "DatagramListener",
    "DatagramQueuePair",
    "DatagramSource",
    "Destination",
    "DeviceBusyError",
    "DeviceClock",
    "DeviceMemory",
    "DeviceRemovedError",
    "ElementRangeError",
    "Endpoint",
    "EventKind",
    "EventStream",
    "Exposure",
    "Flags",
    "FlushKind",
    "ForeignObjectError",
    "Gid",
    "InsufficientResourcesError",
    "InvalidBufferError",
    "InvalidFlagsError",
    "Lease",
    "LimitExceededError",
    "Listener",
    "MemoryRegion",
    "MemoryWindow",
    "MulticastGroup",
    "NdpyError",
    "NetworkInterface",
    "NotConnectedError",
    "Notify",
    "Operation",
    "PathInfo",
    "PathMigration",
    "Pending",
    "Poller",
    "PortInfo",
    "ProtectionDomain",
    "ProviderError",
    "ProviderNotFoundError",
    "QueueFullError",
    "QueuePair",
    "QueuePairAttributes",
    "QueuePairAttributesError",
    "QueuePairLimits",
    "QueuePairState",
    "QueuePairType",
    "ReadLimits",
    "RegistrationCache",
    "RemoteMemory",
    "RetryPolicy",
    "Sge",
    "SharedReceiveQueue",
    "Status",
    "UnsupportedError",
    "XrcDestination",
    "XrcDomain",
    "XrcReceiveQueue",
    "XrcReceiver",
    "XrcSender",
    "alloc",
    "list_adapters",
    "open_adapter",
]
