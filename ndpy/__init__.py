"""One Python API for RDMA adapters: memory, windows, queue pairs, completions and connections."""

from typing import TYPE_CHECKING, Any

try:
    from ndpy import _core as _core

    if not _core.is_main_interpreter():
        raise ImportError("this is a subinterpreter")
except ImportError as error:
    raise ImportError(
        "ndpy works in the main interpreter only, because all of a process shares its adapters; use threads, or "
        "processes that are started by the 'spawn' method"
        if "subinterpreter" in str(error)
        else (
            f"ndpy's extension module is missing ({error}); install ndpy with pip, or run `python setup.py build_ext "
            "--inplace` in a checkout"
        )
    ) from None

from ndpy._core import Batch, CompletionArray
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
from ndpy.objects.adapter import Adapter
from ndpy.objects.completion import Completion
from ndpy.objects.completion_queue import CompletionQueue
from ndpy.objects.connection import Connector
from ndpy.objects.connection_parameters import ReadLimits, RetryPolicy
from ndpy.objects.datagram_listener import DatagramListener
from ndpy.objects.datagram_queue_pair import MANAGER_QKEY, DatagramQueuePair, Destination
from ndpy.objects.device_memory import DeviceMemory
from ndpy.objects.events import AdapterEvent, EventKind, EventStream
from ndpy.objects.listener import Listener
from ndpy.objects.memory import MemoryRegion, MemoryWindow, RemoteMemory, Sge
from ndpy.objects.multicast_group import MulticastGroup
from ndpy.objects.pending import Pending
from ndpy.objects.poller import Poller
from ndpy.objects.protection_domain import ProtectionDomain
from ndpy.objects.queue_pair import QueuePair
from ndpy.objects.shared_receive_queue import SharedReceiveQueue
from ndpy.objects.work_queues import QueuePairLimits
from ndpy.objects.xrc import XrcDestination, XrcDomain, XrcReceiveQueue, XrcReceiver, XrcSender
from ndpy.platforms import list_adapters, open_adapter
from ndpy.platforms.buffer import Buffer, alloc
from ndpy.vocabulary.clock import DeviceClock
from ndpy.vocabulary.datagram import DatagramSource
from ndpy.vocabulary.endpoint import Endpoint
from ndpy.vocabulary.flags import Access, Capability, CompletionDetails, Flags, FlushKind, Notify, Operation, Status
from ndpy.vocabulary.info import AdapterInfo, Gid, NetworkInterface, PathInfo, PortInfo
from ndpy.vocabulary.queue_pair_attributes import (
    AddressVector,
    AlternatePath,
    PathMigration,
    QueuePairAttributes,
    QueuePairState,
    QueuePairType,
)

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
