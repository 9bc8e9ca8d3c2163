"""The attributes of a queue pair that a program sets by hand, and which of them each change of state takes."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from ndpy import errors
from ndpy.vocabulary.endpoint import MTUS
from ndpy.vocabulary.flags import Access, NamedInt


class QueuePairType(enum.Enum):
    """The transport service of a queue pair.

    Names:
        RC: reliable connection. All requests work, and each message arrives once and in order.
        UC: unreliable connection, with Capability.UNRELIABLE_CONNECTIONS. Sends and writes only. A message that is lost
            is lost as a whole, and its sender does not learn of it. A message that finds no receive is dropped.
        UD: datagrams, with Capability.DATAGRAMS. Adapter.create_datagram_queue_pair() makes such a queue pair.
        XRC_SEND, XRC_RECV: the two ends of an extended reliable connection, with Capability.XRC.
            Adapter.create_xrc_sender() and XrcDomain.create_receiver() make them.
    Source: ibv_create_qp(3), enum ibv_qp_type.
    """

    RC = "RC"
    UC = "UC"
    UD = "UD"
    XRC_SEND = "XRC_SEND"
    XRC_RECV = "XRC_RECV"


class QueuePairState(NamedInt):
    """The states of a queue pair.

    Names:
        RESET: it does nothing.
        INIT: receives may be posted.
        RTR: ready to receive. It takes messages of the peer.
        RTS: ready to send. It also sends.
        SQD: it sends no further messages.
        SQE: a request of an unreliable queue pair has failed. Receives go on.
        ERROR: all requests complete CANCELED.
    Source: enum ibv_qp_state; ibv_modify_qp(3).
    """

    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERROR = 6


class PathMigration(NamedInt):
    """Whether the adapter may change to the alternate path by itself.

    Names:
        MIGRATED: it uses the path that it has. This is the state without an alternate path.
        REARM: it will be ARMED when the peer's adapter wants it too.
        ARMED: it changes to the alternate path when the path fails.
    Source: enum ibv_mig_state.
    """

    MIGRATED = 0
    REARM = 1
    ARMED = 2


@dataclasses.dataclass(frozen=True)
class AddressVector:
    """Where the packets of a queue pair go.

    Parameters:
        gid: the peer's GID, 16 bytes. None for packets without GIDs, within a subnet of InfiniBand.
        gid_index: which GID of this side's port goes with it.
        lid: the peer's address on InfiniBand. 0 on Ethernet.
        port: the number of the local port.
        service_level: 0 to 15. On Ethernet it chooses the priority of a tagged frame.
        traffic_class: 0 to 255. On RoCE v2 it is the IP header's byte of that name, or TOS.
        flow_label: 0 to 2**20 - 1.
        hop_limit: 0 to 255. On RoCE the kernel takes that of its route instead.
        source_path_bits: 0 to 127. The low bits of this side's LID.
        rate: the code of the most that the packets may use (enum ibv_rate). 0 for no limit.
    Raises:
        ValueError: a value is out of range.
    Source: struct ibv_ah_attr; ibv_create_ah(3).
    """

    gid: bytes | None = None
    gid_index: int = 0
    lid: int = 0
    port: int = 1
    service_level: int = 0
    traffic_class: int = 0
    flow_label: int = 0
    hop_limit: int = 64
    source_path_bits: int = 0
    rate: int = 0

    def __post_init__(self) -> None:
        if self.gid is not None and (not isinstance(self.gid, bytes) or len(self.gid) != 16):
            raise ValueError(f"gid is 16 bytes or None, not {self.gid!r}")
        for name, bits in _BITS_OF_VECTOR.items():
            _check_number(name, getattr(self, name), 0, (1 << bits) - 1)


_BITS_OF_VECTOR = {
    "gid_index": 8,
    "lid": 16,
    "port": 8,
    "service_level": 4,
    "traffic_class": 8,
    "flow_label": 20,
    "hop_limit": 8,
    "source_path_bits": 7,
    "rate": 8,
}


@dataclasses.dataclass(frozen=True)
class AlternatePath:
    """Where the packets go if the path fails. See PathMigration.

    Parameters:
        path: its addresses. It may use another port of the adapter.
        pkey_index: 0 to 65535.
        ack_timeout: 0 to 31, as in RetryPolicy.
    Source: alt_ah_attr, alt_pkey_index, alt_port_num and alt_timeout of struct ibv_qp_attr.
    """

    path: AddressVector
    pkey_index: int = 0
    ack_timeout: int = 0

    def __post_init__(self) -> None:
        _check_number("pkey_index", self.pkey_index, 0, 0xFFFF)
        _check_number("ack_timeout", self.ack_timeout, 0, 31)


@dataclasses.dataclass(frozen=True)
class QueuePairAttributes:
    """The attributes of a queue pair. QueuePair.modify() takes them by name, and QueuePair.query() returns them.

    Parameters:
        state: the state to change to, or the present one.
        access: the rights of the peer on this queue pair: REMOTE_READ, REMOTE_WRITE and REMOTE_ATOMIC. The memory has
            to grant them too.
        pkey_index: 0 to 65535. Which entry of the port's table of P_Keys the packets carry.
        port: the number of the local port.
        qkey: what datagrams have to carry that this queue pair takes.
        path: where the packets go. On a port whose link layer is Ethernet it needs a GID.
        path_mtu: 256, 512, 1024, 2048 or 4096 bytes, the same on both sides.
        remote_number: the number of the peer's queue pair, 24 bits.
        receive_psn, send_psn: the sequence numbers of the first packets, 24 bits. One side's receive_psn is the other's
            send_psn.
        inbound_read_limit, outbound_read_limit: how many reads and atomic operations of the peer, and of this side, may
            run at once. 0 to 255.
        min_rnr_timer, ack_timeout, retry_count, rnr_retry_count: as in RetryPolicy.
        alternate_path, path_migration: a second path, and when it is used.
        rate_limit: the most that it may send, in kilobits per second (adapters with packet pacing).
        notify_drained: with SQD: whether an event tells when the queue is drained.
        current_state: the state that the program believes in. Only to change from SQE or SQD.
    Raises:
        ValueError: a value is out of range.
    Source: struct ibv_qp_attr; ibv_modify_qp(3), ibv_query_qp(3).
    """

    state: QueuePairState | None = None
    access: Access | None = None
    pkey_index: int | None = None
    port: int | None = None
    qkey: int | None = None
    path: AddressVector | None = None
    path_mtu: int | None = None
    remote_number: int | None = None
    receive_psn: int | None = None
    send_psn: int | None = None
    inbound_read_limit: int | None = None
    outbound_read_limit: int | None = None
    min_rnr_timer: int | None = None
    ack_timeout: int | None = None
    retry_count: int | None = None
    rnr_retry_count: int | None = None
    alternate_path: AlternatePath | None = None
    path_migration: PathMigration | None = None
    rate_limit: int | None = None
    notify_drained: bool | None = None
    current_state: QueuePairState | None = None

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None:
                _check_number(name, value, 0, most)
        if self.path_mtu is not None and self.path_mtu not in MTUS:
            raise ValueError(f"path_mtu is {', '.join(map(str, MTUS))}, not {self.path_mtu!r}")
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise TypeError(f"{name} is of the type {kind.__name__}, not {type(value).__name__}")

    def given(self) -> dict[str, Any]:
        """The attributes that are not None, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


_MOST = {
    "pkey_index": 0xFFFF,
    "port": 0xFF,
    "remote_number": 0xFFFFFF,
    "receive_psn": 0xFFFFFF,
    "send_psn": 0xFFFFFF,
    "inbound_read_limit": 0xFF,
    "outbound_read_limit": 0xFF,
    "min_rnr_timer": 31,
    "ack_timeout": 31,
    "retry_count": 7,
    "rnr_retry_count": 7,
    "rate_limit": 0xFFFFFFFF,
    "qkey": 0xFFFFFFFF,
}
_KINDS: dict[str, type] = {
    "state": QueuePairState,
    "current_state": QueuePairState,
    "path": AddressVector,
    "alternate_path": AlternatePath,
    "path_migration": PathMigration,
}

#: What the fields of struct ibv_qp_attr are called here, where their names differ.
VERBS_NAMES: Mapping[str, str] = {
    "qp_state": "state",
    "cur_qp_state": "current_state",
    "qp_access_flags": "access",
    "port_num": "port",
    "ah_attr": "path",
    "dest_qp_num": "remote_number",
    "rq_psn": "receive_psn",
    "sq_psn": "send_psn",
    "max_dest_rd_atomic": "inbound_read_limit",
    "max_rd_atomic": "outbound_read_limit",
    "timeout": "ack_timeout",
    "retry_cnt": "retry_count",
    "rnr_retry": "rnr_retry_count",
    "alt_ah_attr": "alternate_path",
    "alt_pkey_index": "alternate_path",
    "alt_port_num": "alternate_path",
    "alt_timeout": "alternate_path",
    "path_mig_state": "path_migration",
    "en_sqd_async_notify": "notify_drained",
}


def check_names(names: Iterable[str]) -> None:
    """Raise TypeError for the first name that no attribute has."""
    known = QueuePairAttributes.__dataclass_fields__
    for name in names:
        if name not in known:
            hint = f"verbs' {name} is {VERBS_NAMES[name]}" if name in VERBS_NAMES else f"it has {', '.join(known)}"
            raise TypeError(f"modify: a queue pair has no attribute {name}; {hint}")


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {least} to {most}, not {value!r}")


# ---- which attributes a change of state takes ----

_RESET, _INIT, _RTR, _RTS, _SQD, _SQE, _ERROR = QueuePairState
_ANY = frozenset[str]()
_CONNECTED = frozenset({"access", "alternate_path", "path_migration"})
# Of a queue that is drained.
_DRAINED = _CONNECTED | {"port", "path", "pkey_index"}
_OF_RESPONDERS = frozenset({"inbound_read_limit", "min_rnr_timer"})
_OF_REQUESTERS = frozenset({"outbound_read_limit", "retry_count", "rnr_retry_count"})
_OF_RELIABLE = _OF_RESPONDERS | _OF_REQUESTERS | {"ack_timeout"}

Change = tuple[QueuePairState, QueuePairState]

_RC = {
    (_RESET, _INIT): (frozenset({"port", "pkey_index", "access"}), _ANY),
    (_INIT, _INIT): (_ANY, frozenset({"port", "pkey_index", "access"})),
    (_INIT, _RTR): (
        frozenset({"path", "path_mtu", "remote_number", "receive_psn", "inbound_read_limit", "min_rnr_timer"}),
        frozenset({"pkey_index", "access", "alternate_path"}),
    ),
    (_RTR, _RTS): (
        frozenset({"send_psn", "outbound_read_limit", "ack_timeout", "retry_count", "rnr_retry_count"}),
        _CONNECTED | {"min_rnr_timer", "rate_limit", "current_state"},
    ),
    (_RTS, _RTS): (_ANY, _CONNECTED | {"min_rnr_timer", "rate_limit", "current_state"}),
    (_RTS, _SQD): (_ANY, frozenset({"notify_drained"})),
    (_SQD, _SQD): (_ANY, _DRAINED | _OF_RELIABLE),
    (_SQD, _RTS): (_ANY, _CONNECTED | {"min_rnr_timer", "rate_limit", "current_state"}),
}


def _without(names: frozenset[str]) -> dict[Change, tuple[frozenset[str], frozenset[str]]]:
    return {change: (needed - names, taken - names) for change, (needed, taken) in _RC.items()}


#: For each change of state: the attributes that it needs, and those that it also takes. Besides, each state changes to
#: RESET and to ERROR, with no attributes. Source: InfiniBand Architecture, volume 1, 11.2.5.2; ibv_modify_qp(3).
CHANGES: Mapping[QueuePairType, Mapping[Change, tuple[frozenset[str], frozenset[str]]]] = {
    QueuePairType.RC: _RC,
    QueuePairType.XRC_SEND: _without(_OF_RESPONDERS),
    QueuePairType.XRC_RECV: _without(_OF_REQUESTERS | {"rate_limit"}),
    QueuePairType.UC: {**_without(_OF_RELIABLE), (_SQE, _RTS): (_ANY, frozenset({"access", "current_state"}))},
    QueuePairType.UD: {
        (_RESET, _INIT): (frozenset({"port", "pkey_index", "qkey"}), _ANY),
        (_INIT, _INIT): (_ANY, frozenset({"port", "pkey_index", "qkey"})),
        (_INIT, _RTR): (_ANY, frozenset({"pkey_index", "qkey"})),
        (_RTR, _RTS): (frozenset({"send_psn"}), frozenset({"qkey", "current_state"})),
        (_RTS, _RTS): (_ANY, frozenset({"qkey", "current_state"})),
        (_RTS, _SQD): (_ANY, frozenset({"notify_drained"})),
        (_SQD, _SQD): (_ANY, frozenset({"pkey_index", "qkey"})),
        (_SQD, _RTS): (_ANY, frozenset({"qkey", "current_state"})),
        (_SQE, _RTS): (_ANY, frozenset({"qkey", "current_state"})),
    },
}


def check_change(kind: QueuePairType, present: QueuePairState, given: Mapping[str, Any]) -> None:
    """Raise QueuePairAttributesError unless a queue pair in the state `present` takes these attributes."""
    state = given.get("state", present)
    names = set(given) - {"state"}
    if state in (_RESET, _ERROR):
        needed, taken = _ANY, _ANY
    elif (present, state) in CHANGES[kind]:
        needed, taken = CHANGES[kind][present, state]
    else:
        ways = sorted({end for begin, end in CHANGES[kind] if begin is present} | {_RESET, _ERROR})
        raise errors.QueuePairAttributesError(
            f"modify: a queue pair of type {kind.name} cannot change from {present.name} to {state.name}; from "
            f"{present.name} it changes to {', '.join(way.name for way in ways)}"
        )
    change = f"a queue pair of type {kind.name} that changes from {present.name} to {state.name}"
    if needed - names:
        raise errors.QueuePairAttributesError(
            f"modify: {change} needs {_listed(needed)}; missing: {_listed(needed - names)}"
        )
    if names - needed - taken:
        raise errors.QueuePairAttributesError(
            f"modify: {change} does not take {_listed(names - needed - taken)}; it takes "
            f"{_listed(needed | taken) or 'nothing'}"
        )


def _listed(names: frozenset[str] | set[str]) -> str:
    return ", ".join(name for name in QueuePairAttributes.__dataclass_fields__ if name in names)
