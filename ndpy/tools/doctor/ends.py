"""Compares the links of the two ends of a connection, and says which end is probably wrong.

A FAIL keeps data from arriving. A WARN costs speed, loses packets under load, or may be meant that way. Settings that
one of the systems does not tell are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator

from ndpy.tools.doctor.findings import Finding, failed, warned
from ndpy.tools.doctor.link import LinkDescription

NEAR, FAR = "this end", "the peer"
# Headers and checksum of a write's packet over IPv6: 40 of IP, 8 of UDP, 12 of BTH, 16 of RETH, 4 of ICRC. Some drivers
# leave more room, and so choose a smaller packet: iboe_get_mtu() in rdma/ib_addr.h leaves 96.
_ROCE_HEADERS = 80
_PAYLOADS = (256, 512, 1024, 2048, 4096)
_ROCE_LINK_MTU = 4200
_NOT_KNOWN = "not known"

_End = tuple[str, LinkDescription]


def roce_payload(link_mtu: int) -> int:
    """The largest payload of RoCE packets on a link of this MTU. 0 if there is none."""
    return max((size for size in _PAYLOADS if size <= link_mtu - _ROCE_HEADERS), default=0)


def set_mtu(end: LinkDescription, mtu: int) -> str:
    """How to set the MTU of an end's interface."""
    if end.transport == "NetworkDirect":
        return (
            f"set the MTU of {end.netdev or 'the interface of ' + end.adapter} to {mtu}, in the settings of its driver"
        )
    raised = [end.netdev or "NETDEV"]
    # A VLAN's interface cannot have a larger MTU than the one below it.
    if end.physical and end.physical != end.netdev and (end.physical_mtu or 0) < mtu:
        raised.insert(0, end.physical)
    return ", then ".join(f"ip link set {name} mtu {mtu}" for name in raised)


def _physical(end: LinkDescription) -> str:
    """The interface that pause frames, PFC and ECN are set for."""
    return end.physical or end.netdev or "NETDEV"


def _rdma_cm_setting(end: LinkDescription, name: str, value: object) -> str:
    """How to change a default of the connection manager. The adapter's folder exists only after somebody made it."""
    folder = f"/sys/kernel/config/rdma_cm/{end.adapter}"
    return f"mkdir -p {folder}; echo {value} > {folder}/ports/{end.port or 1}/{name}"


def compare(near: LinkDescription, far: LinkDescription, *, connected: bool) -> list[Finding]:
    """What is wrong between this end and the peer.

    connected: whether a connection between them works. Then different VLANs reach each other, by a switch or a router.
    """
    if "NetworkDirect" not in (near.transport, far.transport) and near.transport != far.transport:
        message = f"{NEAR} speaks {near.transport} ({near.adapter}), {FAR} {far.transport} ({far.adapter})"
        return [failed("transport", message, "take two adapters of the same transport, with ndpy smoke ADAPTER")]
    return [
        *_states(near, far),
        *_mtus(near, far),
        *_gid_types(near, far),
        *_vlans(near, far, connected),
        *_flow_control(near, far),
        *_pause(near, far),
        *_congestion(near, far),
        *_traffic_classes(near, far),
    ]


def agreement(near: LinkDescription, far: LinkDescription) -> str:
    """What the two ends have in common, and what is not known of them, in one line."""

    def shown(setting: str, mine: object, theirs: object) -> str:
        if mine == theirs:
            return f"{setting} {mine}"
        return f"{setting}: {NEAR} {mine}, {FAR} {theirs}"

    settings = [("link MTU", _told(near.link_mtu), _told(far.link_mtu))]
    if near.has_path_mtu:
        settings.append(("RDMA MTU", _told(near.rdma_mtu), _told(far.rdma_mtu)))
        settings.append(("GID type", _told(near.gid_type), _told(far.gid_type)))
    settings += [
        ("VLAN", _tag(near.vlan), _tag(far.vlan)),
        ("PFC", _priorities(near.pfc), _priorities(far.pfc)),
        ("pause frames", _pause_words(near), _pause_words(far)),
        ("ECN", _ecn_words(near), _ecn_words(far)),
    ]
    if near.speed or far.speed:
        settings.append(("speed", _told(near.speed), _told(far.speed)))
    return "; ".join(shown(*setting) for setting in settings)


def _told(value: object) -> str:
    return _NOT_KNOWN if value is None else str(value)


def _tag(vlan: int | None) -> str:
    return _NOT_KNOWN if vlan is None else str(vlan or "none")


def _priorities(priorities: tuple[int, ...] | None) -> str:
    if priorities is None:
        return _NOT_KNOWN
    return f"on for {', '.join(map(str, priorities))}" if priorities else "off"


def _pause_words(end: LinkDescription) -> str:
    if end.pause_receive is None or end.pause_send is None:
        return _NOT_KNOWN
    return f"receive {'on' if end.pause_receive else 'off'}, send {'on' if end.pause_send else 'off'}"


def _ecn_words(end: LinkDescription) -> str:
    if end.ecn_notification is None and end.ecn_reaction is None:
        return _NOT_KNOWN
    return f"notification {_priorities(end.ecn_notification)}, reaction {_priorities(end.ecn_reaction)}"


def _where(end: LinkDescription) -> str:
    return f" ({end.netdev})" if end.netdev else f" ({end.adapter})"


def _below(end: LinkDescription) -> str:
    """The interface whose flow control is meant."""
    return f" ({end.physical})" if end.physical else _where(end)


def _at(name: str) -> str:
    """Where a remedy is to be applied."""
    return f"on {'this machine' if name == NEAR else 'the peer'}: "


def _states(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    for name, end in ((NEAR, near), (FAR, far)):
        if end.port_state not in (None, "unknown", "active"):
            yield failed(
                "port",
                f"{name}: the port of {end.adapter} is {end.port_state}",
                _at(name)
                + (f"ip link set {_physical(end)} up, or check the cable" if end.netdev else "check the cable"),
            )


def _mtus(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    roce = near.transport == "RoCE"
    ends = ((NEAR, near), (FAR, far))
    if roce:
        too_large = [finding for name, end in ends for finding in _own_mtu(name, end)]
        if too_large:
            # Its remedy mends the difference as well.
            yield from too_large
            return
    if near.link_mtu is not None and far.link_mtu is not None and near.link_mtu != far.link_mtu:
        numbers = f"{NEAR}: MTU {near.link_mtu}{_where(near)}, {FAR}: {far.link_mtu}{_where(far)}"
        name, end = _smaller(ends, near.link_mtu, far.link_mtu)
        larger = max(near.link_mtu, far.link_mtu)
        remedy = f"{_at(name)}{set_mtu(end, larger)}, if every switch between them carries that"
        known = [size for size in (near.rdma_mtu, far.rdma_mtu) if size is not None]
        payload = min([roce_payload(min(near.link_mtu, far.link_mtu)), *known])
        if roce and payload < max(known if len(known) == 2 else [roce_payload(larger)]):
            lost = f"RoCE packets of more than {payload} bytes get lost on the way to that end"
            yield failed("link MTU", f"{numbers}. Probably {name} is wrong; {lost}", remedy)
        else:
            yield warned("link MTU", f"{numbers}. Probably {name} is wrong; larger frames get lost there", remedy)
    elif near.rdma_mtu is not None and far.rdma_mtu is not None and near.rdma_mtu != far.rdma_mtu:
        numbers = f"{NEAR}: RDMA MTU {near.rdma_mtu} ({near.adapter}), {FAR}: {far.rdma_mtu} ({far.adapter})"
        name, end = _smaller(ends, near.rdma_mtu, far.rdma_mtu)
        if roce:
            remedy = _at(name) + set_mtu(end, _ROCE_LINK_MTU)
            yield failed("RDMA MTU", f"{numbers}. Probably {name} is wrong", remedy)
        else:
            remedy = "look at the MTU of both ports in the subnet manager's configuration"
            yield warned("RDMA MTU", f"{numbers}. Probably {name} is wrong", remedy)


def _own_mtu(name: str, end: LinkDescription) -> Iterator[Finding]:
    if end.link_mtu and end.rdma_mtu and end.rdma_mtu > roce_payload(end.link_mtu):
        yield failed(
            "RDMA MTU",
            f"{name}: {end.adapter} sends packets of {end.rdma_mtu} bytes, and its interface{_where(end)} has MTU "
            f"{end.link_mtu}, which carries {roce_payload(end.link_mtu)}",
            _at(name) + set_mtu(end, end.rdma_mtu + _ROCE_LINK_MTU - 4096),
        )


def _smaller(ends: tuple[_End, _End], mine: int, theirs: int) -> _End:
    return ends[0] if mine < theirs else ends[1]


def _gid_types(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    types = (near.gid_type, far.gid_type)
    if set(types) != {"RoCE v1", "RoCE v2"}:
        return
    name, end = (NEAR, near) if near.gid_type == "RoCE v1" else (FAR, far)
    yield failed(
        "GID type",
        f"{NEAR}: {near.gid_type} (GID {_told(near.gid_index)}, {_told(near.gid)}), {FAR}: {far.gid_type} (GID "
        f"{_told(far.gid_index)}, {_told(far.gid)}). Probably {name} is wrong; RoCE v1 and v2 do not talk, and only v2 "
        "passes "
        "routers",
        _at(name) + _rdma_cm_setting(end, "default_roce_mode", '"RoCE v2"') + ", or choose another GID",
    )


def _vlans(near: LinkDescription, far: LinkDescription, connected: bool) -> Iterator[Finding]:
    if near.vlan is None or far.vlan is None or near.vlan == far.vlan:
        return
    numbers = f"{NEAR}: VLAN {_tag(near.vlan)}{_where(near)}, {FAR}: VLAN {_tag(far.vlan)}{_where(far)}"
    if near.vlan and far.vlan:
        guess = "One of the two is wrong, unless a router stands between them"
        remedy = "give both ends addresses in the same VLAN"
    else:
        name, end, vlan = (NEAR, near, far.vlan) if near.vlan == 0 else (FAR, far, near.vlan)
        guess = f"Probably {name} is wrong, unless its switch adds the tag"
        remedy = (
            f"{_at(name)}ip link add link {_physical(end)} name {_physical(end)}.{vlan} type vlan id {vlan}, and the "
            "address there"
        )
    make = warned if connected else failed
    yield make("VLAN", f"{numbers}. {guess}", remedy)


def _flow_control(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    if near.pfc is None or far.pfc is None or near.pfc == far.pfc:
        return
    name, end, missing = _missing(near, far, near.pfc, far.pfc)
    change = " ".join(f"{priority}:on" for priority in missing)
    yield warned(
        "PFC",
        f"priority flow control: {NEAR} {_priorities(near.pfc)}{_below(near)}, {FAR} "
        f"{_priorities(far.pfc)}{_below(far)}. {_guess(name, near.pfc, far.pfc)}; packets get lost under load",
        f"{_at(name)}dcb pfc set dev {_physical(end)} prio-pfc {change}, and the same on the switches",
    )


def _missing(
    near: LinkDescription, far: LinkDescription, mine: tuple[int, ...], theirs: tuple[int, ...]
) -> tuple[str, LinkDescription, list[int]]:
    """The end that has fewer priorities, and those that it lacks. This end if both lack some."""
    lacks_near, lacks_far = sorted(set(theirs) - set(mine)), sorted(set(mine) - set(theirs))
    return (NEAR, near, lacks_near) if lacks_near else (FAR, far, lacks_far)


def _guess(name: str, mine: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    if set(mine) - set(theirs) and set(theirs) - set(mine):
        return "One of the two is wrong"
    return f"Probably {name} is wrong"


def _pause(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    for name, end in ((NEAR, near), (FAR, far)):
        if end.pfc and (end.pause_receive or end.pause_send):
            yield warned(
                "pause frames",
                f"{name}: pause frames and priority flow control are both on{_below(end)}. An interface does only one "
                "of them",
                f"{_at(name)}ethtool -A {_physical(end)} rx off tx off",
            )
            return
    mine, theirs = (near.pause_receive, near.pause_send), (far.pause_receive, far.pause_send)
    if None in mine or None in theirs or mine == theirs:
        return
    # With flow control by priority on one end, that is the difference to mend.
    if near.pfc or far.pfc:
        return
    name, end = (NEAR, near) if sum(map(bool, mine)) <= sum(map(bool, theirs)) else (FAR, far)
    yield warned(
        "pause frames",
        f"pause frames: {NEAR} {_pause_words(near)}{_below(near)}, {FAR} {_pause_words(far)}{_below(far)}. Probably "
        f"{name} is "
        "wrong; packets get lost under load",
        f"{_at(name)}ethtool -A {_physical(end)} rx on tx on",
    )


def _congestion(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    for part, folder, mine, theirs in (
        ("notification", "roce_np", near.ecn_notification, far.ecn_notification),
        ("reaction", "roce_rp", near.ecn_reaction, far.ecn_reaction),
    ):
        if mine is None or theirs is None or mine == theirs:
            continue
        name, end, missing = _missing(near, far, mine, theirs)
        place = f"/sys/class/net/{_physical(end)}/ecn/{folder}/enable"
        yield warned(
            "ECN",
            f"ECN {part}: {NEAR} {_priorities(mine)}{_below(near)}, {FAR} {_priorities(theirs)}{_below(far)}. "
            f"{_guess(name, mine, theirs)}; congestion then slows only one direction down",
            _at(name) + "; ".join(f"echo 1 > {place}/{priority}" for priority in missing),
        )


def _traffic_classes(near: LinkDescription, far: LinkDescription) -> Iterator[Finding]:
    mine, theirs = near.traffic_class, far.traffic_class
    if mine is None or theirs is None or mine == theirs:
        return
    name, end = (NEAR, near) if not mine else (FAR, far)
    guess = f"Probably {name} is wrong" if not mine or not theirs else "One of the two is wrong"
    yield warned(
        "traffic class",
        f"default traffic class (TOS): {NEAR} {mine} ({near.adapter}), {FAR} {theirs} ({far.adapter}). {guess}; "
        "switches may put "
        "the two directions into different queues",
        _at(name) + _rdma_cm_setting(end, "default_roce_tos", mine or theirs),
    )
