"""One end's link: what its system says about the network interface and the RDMA port that connections use.

A description can come from the other machine. So from_dict() checks every value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from ndpy.vocabulary.addresses import plain_address
from ndpy.vocabulary.info import AdapterInfo, Gid, PortInfo, is_address
from ndpy.vocabulary.quirks import Quirk

PRIORITIES = 8
_TRANSPORTS = ("RoCE", "InfiniBand", "iWARP", "NetworkDirect")
_GID_TYPES = ("RoCE v1", "RoCE v2", "InfiniBand", "IB", "iWARP", "unknown")
_LINK_LAYERS = ("Ethernet", "InfiniBand", "unknown")
_STATES = ("active", "down", "init", "armed", "unknown")
# A name ends up in commands that a person may copy.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+-]{0,63}")
_SPEED = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ./()-]{0,39}")
_MOST_ADDRESSES = 64
_LARGEST_MTU = 1 << 17


# ---- reading what another machine says: a value other than None, its name for the error, and what is allowed ----


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is a text")
    return value


def _matching(value: Any, name: str, allowed: re.Pattern[str]) -> str | None:
    return value if allowed.fullmatch(_text(value, name)) else None


def _one_of(value: Any, name: str, allowed: tuple[str, ...]) -> str | None:
    return value if _text(value, name) in allowed else None


def _address(value: Any, name: str = "") -> str | None:
    """An IP address, without the scope of its machine."""
    return str(plain_address(value)) if isinstance(value, str) and len(value) <= 64 and is_address(value) else None


def _addresses(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > _MOST_ADDRESSES:
        raise ValueError(f"{name} is a list of at most {_MOST_ADDRESSES}")
    return tuple(filter(None, map(_address, value)))


def _integer(value: Any, name: str, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} is an integer from {low} to {high}")
    return value


def _boolean(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} is true or false")
    return value


def _priorities(value: Any, name: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > PRIORITIES:
        raise ValueError(f"{name} is a list of at most {PRIORITIES} priorities")
    if any(type(entry) is not int or not 0 <= entry < PRIORITIES for entry in value):
        raise ValueError(f"a priority is an integer from 0 to {PRIORITIES - 1}")
    return tuple(sorted(set(value)))


def _read_by(read: Callable[..., Any], *allowed: Any, **options: Any) -> Any:
    """A field that from_dict() reads by this function. It is None by default."""
    return dataclasses.field(**{"default": None, **options}, metadata={"read": (read, allowed)})


@dataclasses.dataclass(frozen=True)
class LinkDescription:
    """One end's link. None always means that it is not known.

    Parameters:
        adapter: the adapter's name.
        transport: as AdapterInfo.transport.
        addresses: as AdapterInfo.addresses.
        port: the number of the port.
        port_state, link_layer: as in PortInfo.
        speed: the port's speed in words of the system, such as "100 Gb/sec (4X EDR)".
        netdev: the network interface of the GID, which may be a VLAN's, or else of the port.
        link_mtu: the MTU of that interface.
        physical: the interface that frames leave by: `netdev`, or the one below a VLAN's. Pause frames, PFC and ECN are
            settings of it.
        physical_mtu: the MTU of that interface. A VLAN's cannot be larger.
        rdma_mtu: the largest payload of the port's packets. On iWARP there is none.
        gid, gid_index, gid_type: the GID in use, as an IP address.
        vlan: the VLAN's ID; 0 if frames have no tag.
        pfc: the priorities with priority flow control.
        pause_receive, pause_send: whether the interface obeys pause frames, and whether it sends them.
        ecn_notification: the priorities for which the adapter answers marked packets of RoCE with notifications.
        ecn_reaction: the priorities for which the adapter sends more slowly after a notification.
        traffic_class: the TOS byte that librdmacm gives connections unless the program sets another one.
    """

    adapter: str = dataclasses.field(metadata={"read": (_matching, (_NAME,))})
    transport: str = dataclasses.field(metadata={"read": (_one_of, (_TRANSPORTS,))})
    addresses: tuple[str, ...] = _read_by(_addresses, default=())
    port: int | None = _read_by(_integer, 1, 255)
    port_state: str | None = _read_by(_one_of, _STATES)
    link_layer: str | None = _read_by(_one_of, _LINK_LAYERS)
    speed: str | None = _read_by(_matching, _SPEED)
    netdev: str | None = _read_by(_matching, _NAME)
    link_mtu: int | None = _read_by(_integer, 0, _LARGEST_MTU)
    physical: str | None = _read_by(_matching, _NAME)
    physical_mtu: int | None = _read_by(_integer, 0, _LARGEST_MTU)
    rdma_mtu: int | None = _read_by(_integer, 0, _LARGEST_MTU)
    gid: str | None = _read_by(_address)
    gid_index: int | None = _read_by(_integer, 0, 1 << 16)
    gid_type: str | None = _read_by(_one_of, _GID_TYPES)
    vlan: int | None = _read_by(_integer, 0, 4094)
    pfc: tuple[int, ...] | None = _read_by(_priorities)
    pause_receive: bool | None = _read_by(_boolean)
    pause_send: bool | None = _read_by(_boolean)
    ecn_notification: tuple[int, ...] | None = _read_by(_priorities)
    ecn_reaction: tuple[int, ...] | None = _read_by(_priorities)
    traffic_class: int | None = _read_by(_integer, 0, 255)

    @property
    def has_path_mtu(self) -> bool:
        """Whether the transport sends packets of its own, with GIDs and a path MTU. Over TCP it does not."""
        return has_path_mtu(self.transport)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LinkDescription:
        """Read what to_dict() wrote on another machine. A text of an unexpected kind becomes None and is not printed.

        Raises:
            ValueError: to_dict() cannot have written this.
        """
        if not isinstance(values, Mapping):
            raise ValueError("a description of a link is an object")
        unknown = sorted(str(name) for name in set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(f"a description of a link has no {unknown[0][:40]!r}")
        found: dict[str, Any] = {"adapter": None, "transport": None}
        for field in dataclasses.fields(cls):
            value = values.get(field.name, field.default)
            if value is not field.default:
                read, allowed = field.metadata["read"]
                found[field.name] = read(value, field.name, *allowed)
        found["adapter"] = found["adapter"] or "its adapter"
        found["transport"] = found["transport"] or "unknown"
        return cls(**found)


def has_path_mtu(transport: str) -> bool:
    return not Quirk.IWARP_NO_PATH_MTU.value.is_of("", transport)


def plain_description(info: AdapterInfo, port: PortInfo | None, gid: Gid | None) -> LinkDescription:
    """What an adapter says about itself. A NetworkDirect provider tells the MTU of its interface only."""
    native = info.provider == "verbs"
    netdev = info.netdev or (port.netdev if port is not None else None)
    return LinkDescription(
        adapter=info.name,
        transport=info.transport,
        addresses=tuple(info.addresses),
        port=port.number if port is not None else None,
        port_state=port.state if port is not None else info.state,
        link_layer=port.link_layer if port is not None else None,
        netdev=netdev,
        physical=netdev,
        link_mtu=None if native else info.mtu or None,
        rdma_mtu=(port.mtu or None) if native and port is not None and has_path_mtu(info.transport) else None,
        gid=gid.address if gid is not None else None,
        gid_index=gid.index if gid is not None else None,
        gid_type=gid.type if gid is not None else None,
    )
