"""Copies and pickles: what owns something has none, and values are equal to theirs."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from inspect import isclass

import pytest

import ndpy
import ndpy.aio
import ndpy.ndk
from ndpy.ndk import Mdl
from ndpy.objects.resource import Uncopied

WAYS = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{
        f"pickle {protocol}": lambda thing, protocol=protocol: pickle.loads(pickle.dumps(thing, protocol))
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    },
}
VECTOR = ndpy.AddressVector(gid=bytes(range(16)), port=2, traffic_class=7)
VALUES = [
    ndpy.RemoteMemory(0x7F00_0000_1234, 4096, 0xFEED),
    ndpy.RemoteMemory(0x7F00_0000_1234, 4096, 0xFEED)[16:4000][8:],
    ndpy.Endpoint(3, 0x1234, 0x5678, bytes(range(16)), gid_index=1, gid_type="RoCE v2", mtu=1024, inbound_read_limit=4),
    ndpy.RetryPolicy(retry_count=3, ack_timeout=14),
    VECTOR,
    ndpy.AlternatePath(VECTOR, pkey_index=1),
    ndpy.QueuePairAttributes(state=ndpy.QueuePairState.RTS, access=ndpy.Access.REMOTE_WRITE, path=VECTOR),
    ndpy.QueuePairLimits(1, 2, 3, 4, 5),
    ndpy.ReadLimits(3, 4),
    ndpy.CacheStats(hits=3, misses=4),
    ndpy.DeviceClock(1, 2, 48, 3, 4),
    ndpy.XrcDestination(0x1234),
    ndpy.AdapterEvent(ndpy.EventKind.PORT_ACTIVE, 1, None, "port active"),
    ndpy.Gid(0, bytes(16), "RoCE v2", "10.0.0.1"),
    ndpy.NetworkInterface("eth0.10", "vlan", "eth0", 10, ("10.0.0.1",)),
    ndpy.PortInfo(1, "active", "Ethernet", 1024, 4096, 0, "eth0", (ndpy.Gid(0, bytes(16), "RoCE v2", "10.0.0.1"),)),
    ndpy.DatagramSource(**{field.name: 1 for field in dataclasses.fields(ndpy.DatagramSource)}),
    ndpy.PathInfo(**{field.name: 1 for field in dataclasses.fields(ndpy.PathInfo)}),
    ndpy.Access.LOCAL_WRITE | ndpy.Access.REMOTE_READ,
    ndpy.Flags.INLINE | ndpy.Flags.SOLICITED,
    ndpy.Capability.MEMORY_WINDOWS | ndpy.Capability.DATAGRAMS,
    ndpy.Status.SUCCESS,
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_is_equal_to_its_copy(value, way):
    again = WAYS[way](value)
    assert (type(again), again) == (type(value), value)
    if value.__hash__ is not None:
        assert hash(again) == hash(value)


def public_classes() -> list[type]:
    found = {kind for module in (ndpy, ndpy.aio) for name in module.__all__ if isclass(kind := getattr(module, name))}
    found.discard(ndpy.Buffer)
    return sorted(found | {ndpy.ndk.NdkMr, Mdl}, key=lambda kind: kind.__qualname__)


def is_value(kind: type) -> bool:
    values = (enum.Enum, BaseException, tuple, ndpy.RemoteMemory, ndpy.XrcDestination)
    return dataclasses.is_dataclass(kind) or issubclass(kind, values)


@pytest.mark.parametrize("kind", [kind for kind in public_classes() if not is_value(kind)])
def test_a_class_that_is_no_value_has_no_copies(kind):
    assert issubclass(kind, Uncopied)


def test_every_public_value_is_tried():
    plain = {kind for kind in public_classes() if is_value(kind) and not issubclass(kind, (enum.Enum, BaseException))}
    # Tests of real adapters have the description of one.
    assert plain - {ndpy.AdapterInfo} == {type(value) for value in VALUES if not isinstance(value, enum.Enum)}


OWNERS = {
    "Pending": lambda: ndpy.Pending("nothing"),
    "Poller": ndpy.Poller,
    "CompletionArray": lambda: ndpy.CompletionArray(4),
    "Mdl": lambda: Mdl(bytearray(8)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OWNERS)
def test_what_owns_something_refuses_with_a_sentence(name, way):
    with pytest.raises(
        TypeError, match=rf"^\w*{name} objects can be neither copied nor pickled, because they stand for"
    ):
        WAYS[way](OWNERS[name]())
