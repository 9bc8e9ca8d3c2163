"""QueuePairAttributes as struct ibv_qp_attr, and back."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any, NamedTuple

from ndpy.platforms.verbs.adapter_info import mtu_bytes
from ndpy.platforms.verbs.memory import native_access
from ndpy.platforms.verbs.native_calls import check, ffi, lib
from ndpy.vocabulary.endpoint import MTUS
from ndpy.vocabulary.flags import Access
from ndpy.vocabulary.queue_pair_attributes import (
    CHANGES,
    AddressVector,
    AlternatePath,
    PathMigration,
    QueuePairAttributes,
    QueuePairState,
    QueuePairType,
)

# From here on a program needs a privilege (InfiniBand Architecture, volume 1, 3.5.3).
_PRIVILEGED_QKEY = 1 << 31

NATIVE_TYPES = {
    QueuePairType.RC: lib.IBV_QPT_RC,
    QueuePairType.UC: lib.IBV_QPT_UC,
    QueuePairType.UD: lib.IBV_QPT_UD,
    QueuePairType.XRC_SEND: lib.IBV_QPT_XRC_SEND,
    QueuePairType.XRC_RECV: lib.IBV_QPT_XRC_RECV,
}


class _Field(NamedTuple):
    """An attribute. write: puts a value there. read: returns the value that is there."""

    mask: int
    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


def _plain(mask: int, name: str, kind: Callable[[int], Any] = int) -> _Field:
    return _Field(
        mask, lambda native, value: setattr(native, name, int(value)), lambda native: kind(getattr(native, name))
    )


def write_vector(native: Any, vector: AddressVector) -> None:
    """Fill a struct ibv_ah_attr."""
    native.dlid = vector.lid
    native.sl = vector.service_level
    native.src_path_bits = vector.source_path_bits
    native.static_rate = vector.rate
    native.port_num = vector.port
    native.is_global = vector.gid is not None
    if vector.gid is not None:
        native.grh.dgid.raw = list(vector.gid)
        native.grh.flow_label = vector.flow_label
        native.grh.sgid_index = vector.gid_index
        native.grh.hop_limit = vector.hop_limit
        native.grh.traffic_class = vector.traffic_class


def read_vector(native: Any) -> AddressVector:
    """Read a struct ibv_ah_attr."""
    route = native.grh
    routed = (
        {
            "gid": bytes(ffi.buffer(route.dgid.raw)),
            "gid_index": route.sgid_index,
            "traffic_class": route.traffic_class,
            "flow_label": route.flow_label & 0xFFFFF,
            "hop_limit": route.hop_limit,
        }
        if native.is_global
        else {"hop_limit": 0}
    )
    return AddressVector(
        lid=native.dlid,
        port=native.port_num,
        service_level=native.sl & 0xF,
        source_path_bits=native.src_path_bits & 0x7F,
        rate=native.static_rate,
        **routed,
    )


def _write_path(native: Any, vector: AddressVector) -> None:
    write_vector(native.ah_attr, vector)


def _write_alternate(native: Any, alternate: AlternatePath) -> None:
    write_vector(native.alt_ah_attr, alternate.path)
    native.alt_pkey_index = alternate.pkey_index
    native.alt_port_num = alternate.path.port
    native.alt_timeout = alternate.ack_timeout


def _read_alternate(native: Any) -> AlternatePath | None:
    if not native.alt_port_num:
        return None
    return AlternatePath(read_vector(native.alt_ah_attr), native.alt_pkey_index, native.alt_timeout & 31)


_RIGHTS = {
    lib.IBV_ACCESS_REMOTE_READ: Access.REMOTE_READ,
    lib.IBV_ACCESS_REMOTE_WRITE: Access.REMOTE_WRITE,
    lib.IBV_ACCESS_REMOTE_ATOMIC: Access.REMOTE_ATOMIC,
}


def _write_access(native: Any, access: Access) -> None:
    native.qp_access_flags = native_access(Access(access), False)


def _read_access(native: Any) -> Access:
    rights = Access.NONE
    for bit, right in _RIGHTS.items():
        if native.qp_access_flags & bit:
            rights |= right
    return rights


def _write_mtu(native: Any, mtu: int) -> None:
    native.path_mtu = MTUS.index(mtu) + 1


def _read_mtu(native: Any) -> int | None:
    return mtu_bytes(native.path_mtu) if native.path_mtu else None


FIELDS = {
    "state": _plain(lib.IBV_QP_STATE, "qp_state", QueuePairState),
    "current_state": _plain(lib.IBV_QP_CUR_STATE, "cur_qp_state", QueuePairState),
    "access": _Field(lib.IBV_QP_ACCESS_FLAGS, _write_access, _read_access),
    "pkey_index": _plain(lib.IBV_QP_PKEY_INDEX, "pkey_index"),
    "port": _plain(lib.IBV_QP_PORT, "port_num"),
    "qkey": _plain(lib.IBV_QP_QKEY, "qkey"),
    "path": _Field(lib.IBV_QP_AV, _write_path, lambda native: read_vector(native.ah_attr)),
    "path_mtu": _Field(lib.IBV_QP_PATH_MTU, _write_mtu, _read_mtu),
    "remote_number": _plain(lib.IBV_QP_DEST_QPN, "dest_qp_num"),
    "receive_psn": _plain(lib.IBV_QP_RQ_PSN, "rq_psn"),
    "send_psn": _plain(lib.IBV_QP_SQ_PSN, "sq_psn"),
    "inbound_read_limit": _plain(lib.IBV_QP_MAX_DEST_RD_ATOMIC, "max_dest_rd_atomic"),
    "outbound_read_limit": _plain(lib.IBV_QP_MAX_QP_RD_ATOMIC, "max_rd_atomic"),
    "min_rnr_timer": _plain(lib.IBV_QP_MIN_RNR_TIMER, "min_rnr_timer"),
    "ack_timeout": _plain(lib.IBV_QP_TIMEOUT, "timeout"),
    "retry_count": _plain(lib.IBV_QP_RETRY_CNT, "retry_cnt"),
    "rnr_retry_count": _plain(lib.IBV_QP_RNR_RETRY, "rnr_retry"),
    "alternate_path": _Field(lib.IBV_QP_ALT_PATH, _write_alternate, _read_alternate),
    "path_migration": _plain(lib.IBV_QP_PATH_MIG_STATE, "path_mig_state", PathMigration),
    "rate_limit": _plain(lib.IBV_QP_RATE_LIMIT, "rate_limit"),
    "notify_drained": _plain(lib.IBV_QP_EN_SQD_ASYNC_NOTIFY, "en_sqd_async_notify", bool),
}
# Those that only modify() has.
_UNTOLD = {"current_state", "notify_drained", "rate_limit"}
# Those that a queue pair of each type tells: what any of its changes of state needs or takes.
_OF_TYPE = {
    kind: ({"state"}.union(*(needed | taken for needed, taken in changes.values())) - _UNTOLD)
    for kind, changes in CHANGES.items()
}


def modify(queue_pair: Any, given: dict[str, Any], operation: str = "modify", message: str = "") -> None:
    """Set these attributes of a native queue pair.
    If the adapter refuses them, this raises an error with the message.
    """
    attributes, mask = ffi.new("struct ibv_qp_attr *"), 0
    for name, value in given.items():
        field = FIELDS[name]
        field.write(attributes, value)
        mask |= field.mask
    message = message or f"the adapter refused {', '.join(given)}"
    result = lib.ibv_modify_qp(queue_pair, attributes, mask)
    if result == errno.EPERM and given.get("qkey", 0) >= _PRIVILEGED_QKEY:
        message = f"the Q_Key {given['qkey']:#x} needs the privilege CAP_NET_RAW, as all from 2**31 on do"
    check(operation, result, message)


def query(queue_pair: Any, kind: QueuePairType) -> QueuePairAttributes:
    """The attributes of a native queue pair."""
    attributes, mask = ffi.new("struct ibv_qp_attr *"), 0
    for name in _OF_TYPE[kind]:
        mask |= FIELDS[name].mask
    check("query", lib.ibv_query_qp(queue_pair, attributes, mask, ffi.new("struct ibv_qp_init_attr *")))
    return QueuePairAttributes(**{name: FIELDS[name].read(attributes) for name in _OF_TYPE[kind]})


def state_of(queue_pair: Any) -> QueuePairState:
    attributes = ffi.new("struct ibv_qp_attr *")
    check("query", lib.ibv_query_qp(queue_pair, attributes, lib.IBV_QP_STATE, ffi.new("struct ibv_qp_init_attr *")))
    return QueuePairState(attributes.qp_state)
