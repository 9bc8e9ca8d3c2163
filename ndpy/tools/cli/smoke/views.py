"""What each end of a connection sees of the other, beside what the other says about itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ndpy.tools.doctor.ends import FAR, NEAR
from ndpy.vocabulary.addresses import plain_address
from ndpy.vocabulary.info import is_address

_LONGEST = 64


@dataclass(frozen=True)
class View:
    """What one end says about a connection. None: it does not know.

    Parameters:
        own: its own address on the connection.
        other: the address that it sees the other end at.
        own_gid, other_gid: the two GIDs on its path, as IP addresses.
        control_own, control_other: the two addresses of the control connection, as this end sees them.
        addresses: those of its adapter.
    """

    own: str | None
    other: str | None
    own_gid: str | None = None
    other_gid: str | None = None
    control_own: str | None = None
    control_other: str | None = None
    addresses: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], addresses: tuple[str, ...]) -> View:
        """Read the other end's answer. An entry that is not an IP address becomes unknown."""
        names = ("own", "other", "own_gid", "other_gid", "control_own", "control_other")
        return cls(**{name: plain(values.get(name)) for name in names}, addresses=addresses)


def plain(address: Any) -> str | None:
    """An IP address in its usual form, without the scope of its machine. None if this is not one."""
    if isinstance(address, (bytes, bytearray)) and len(address) == 16:
        parsed: ipaddress.IPv4Address | ipaddress.IPv6Address = ipaddress.IPv6Address(bytes(address))
    elif isinstance(address, str) and len(address) <= _LONGEST and is_address(address):
        parsed = plain_address(address)
    else:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return str(mapped or parsed)


def disagreements(near: View, far: View) -> Iterator[str]:
    """A sentence for each way in which an end sees the other as something else than it is."""
    for name, end, other_name, other in ((NEAR, near, FAR, far), (FAR, far, NEAR, near)):
        own = tuple(map(plain, end.addresses))
        if end.own and other.other and end.own != other.other:
            seen = f"{other_name} sees {name} at {other.other}, but {name} says that it is {end.own}"
            if other.other in own:
                yield f"{seen}. Both are addresses of its adapter: {name} sends over the wrong one"
            else:
                yield f"{seen}. An address translator (NAT) or a proxy stands between them"
        if end.own and own and end.own not in own:
            shown = ", ".join(filter(None, own))
            yield (
                f"{name} connects over {end.own}, which is not an address of its adapter ({shown}): the wrong interface"
            )
        if end.own_gid and other.other_gid and end.own_gid != other.other_gid:
            yield f"{other_name} sends to the GID {other.other_gid}, but {name} says that its GID is {end.own_gid}"


def translated_control(near: View, far: View) -> str:
    """A sentence if the control connection is translated on its way, which harms nothing by itself, else ""."""
    if near.control_own and far.control_other and near.control_own != far.control_other:
        return f"the control connection comes from {near.control_own}, and {FAR} sees {far.control_other} (NAT)"
    if far.control_own and near.control_other and far.control_own != near.control_other:
        return f"the control connection goes to {near.control_other}, and {FAR} receives it at {far.control_own} (NAT)"
    return ""


def describe(view: View) -> str:
    """What an end sees, for a report."""
    gids = f", GID {view.own_gid or 'not known'} to {view.other_gid or 'not known'}"
    path = gids if view.own_gid or view.other_gid else ""
    return f"{view.own or 'not known'} to {view.other or 'not known'}{path}"
