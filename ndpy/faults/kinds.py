"""The one table of the kinds of faults, and the words of a scenario. docs/faults.md is made from it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

#: Who makes the faults of a scenario: the engine of soft0, the shim that is loaded over any adapter's libraries, or
#: softnd, which is the same engine behind NetworkDirect.
EXECUTORS = ("engine", "shim", "softnd")
_VERBS = ("engine", "shim")
#: Those for the programs of this system, the usual one first.
HERE = ("softnd",) if sys.platform == "win32" else _VERBS
_SHIM = ("shim",)
#: The only error number of calls of softnd. It stands for the status of a full adapter or queue.
SOFTND_ERRNO = "ENOMEM"

MOST = 2**63 - 1
DAY_MS = 86_400_000
_EVENTS = "ibv_get_async_event(3)"


@dataclass(frozen=True)
class Number:
    """A whole number of a fault."""

    name: str
    minimum: int
    maximum: int
    meaning: str


@dataclass(frozen=True)
class Word:
    """A word of a list."""

    name: str
    words: tuple[str, ...]
    meaning: str


@dataclass(frozen=True)
class Data:
    """Bytes, at most `most` of them. As text: hexadecimal digits."""

    name: str
    maximum: int
    meaning: str


@dataclass(frozen=True)
class Call:
    """A function whose calls can be faulty.

    Attributes:
        name: without `ibv_`, but with `rdma_`.
        errnos: what drivers and kernels return, the most usual one first.
        reference: the page of the manual.
        of_queue_pair: its calls are counted for each queue pair, otherwise for the process.
        limited: whether it makes objects whose number can be limited.
        executors: which of the executors for programs that use verbs can make its calls faulty.
        softnd: "slow" if softnd can make its calls slow, "full" if it can also make them fail as if the adapter or the
            queue were full. "": NetworkDirect has no such call.
    """

    name: str
    errnos: tuple[str, ...]
    reference: str
    of_queue_pair: bool = False
    limited: bool = False
    executors: tuple[str, ...] = _VERBS
    softnd: str = ""

    def who(self, do: str) -> tuple[str, ...]:
        """The executors that can make a fault of this kind at its calls."""
        if do == "limit" and not self.limited:
            return ()
        softnd = self.softnd == "full" or (self.softnd == "slow" and do == "slow")
        return (*self.executors, *(("softnd",) if softnd else ()))


@dataclass(frozen=True)
class Status:
    """A status of ibv_poll_cq(3) other than success.

    Attributes:
        name: without `IBV_WC_`.
        operations: the operations that can end with it.
        reference: who says so.
        executors: who can give it.
    """

    name: str
    operations: tuple[str, ...]
    reference: str
    executors: tuple[str, ...] = EXECUTORS


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        at: the place: call, request, message, connection or adapter.
        do: its name, as a scenario has it.
        meaning: what happens.
        afterwards: the state in which the adapter is then.
        reference: the rule or the driver that shows that this happens.
        values: names of its values. All have to be given.
        optional: names of further values.
        refused: (executor, why it cannot do it).
        for_datagrams: it happens to datagrams only. A sweep makes it only if it is asked for by name.
    """

    at: str
    do: str
    meaning: str
    afterwards: str
    reference: str
    values: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    for_datagrams: bool = False

    @property
    def executors(self) -> tuple[str, ...]:
        """Who can do it."""
        cannot = [name for name, _ in self.refused]
        return tuple(name for name in EXECUTORS if name not in cannot)


#: Their order is that of enum fault_call in softrdma/faults/scenario.h, where the first has the number 1.
CALLS = (
    Call("open_device", ("EIO", "ENOMEM", "ENODEV", "EMFILE"), "ibv_open_device(3)"),
    Call("query_device", ("EIO", "ENOMEM"), "ibv_query_device(3)"),
    Call("query_port", ("EIO", "EINVAL"), "ibv_query_port(3)"),
    Call("query_gid", ("EIO", "EINVAL"), "ibv_query_gid(3)"),
    Call("alloc_pd", ("ENOMEM", "ENOSPC"), "ibv_alloc_pd(3)", limited=True),
    Call(
        "reg_mr",
        ("ENOMEM", "EINVAL", "EFAULT", "EPERM", "EAGAIN", "EOPNOTSUPP"),
        "ibv_reg_mr(3)",
        limited=True,
        softnd="full",
    ),
    Call("dereg_mr", ("EBUSY", "EINVAL"), "ibv_dereg_mr(3)", softnd="slow"),
    Call("alloc_mw", ("ENOMEM", "EOPNOTSUPP"), "ibv_alloc_mw(3)", limited=True, softnd="full"),
    Call("create_comp_channel", ("EMFILE", "ENOMEM"), "ibv_create_comp_channel(3)", limited=True),
    Call("create_cq", ("ENOMEM", "EINVAL", "ENOSPC"), "ibv_create_cq(3)", limited=True, softnd="full"),
    Call("resize_cq", ("ENOMEM", "EINVAL", "ENOSYS"), "ibv_resize_cq(3)", softnd="full"),
    Call("create_srq", ("ENOMEM", "EINVAL", "ENOSPC", "EOPNOTSUPP"), "ibv_create_srq(3)", limited=True, softnd="full"),
    Call("create_qp", ("ENOMEM", "EINVAL", "ENOSPC", "EPERM"), "ibv_create_qp(3)", limited=True, softnd="full"),
    Call("modify_qp", ("EINVAL", "ENOMEM", "ETIMEDOUT", "EIO"), "ibv_modify_qp(3)", of_queue_pair=True),
    Call("query_qp", ("EIO", "EINVAL"), "ibv_query_qp(3)", of_queue_pair=True),
    Call(
        "create_ah",
        ("ENOMEM", "EINVAL", "ETIMEDOUT", "EHOSTUNREACH"),
        "ibv_create_ah(3)",
        limited=True,
        executors=_SHIM,
    ),
    Call("post_send", ("ENOMEM", "EINVAL", "EIO", "EFAULT"), "ibv_post_send(3)", of_queue_pair=True, softnd="full"),
    Call("post_recv", ("ENOMEM", "EINVAL", "EIO", "EFAULT"), "ibv_post_recv(3)", of_queue_pair=True, softnd="full"),
    Call("post_srq_recv", ("ENOMEM", "EINVAL", "EIO", "EFAULT"), "ibv_post_srq_recv(3)", softnd="full"),
    Call("poll_cq", ("EIO", "EINVAL"), "ibv_poll_cq(3)"),
    Call("req_notify_cq", ("EIO", "EINVAL"), "ibv_req_notify_cq(3)", softnd="slow"),
    Call("get_cq_event", ("EINTR", "EIO"), "ibv_get_cq_event(3)"),
    Call("get_async_event", ("EINTR", "EIO"), "ibv_get_async_event(3)"),
    Call("rdma_create_event_channel", ("ENODEV", "EMFILE", "ENOMEM"), "rdma_create_event_channel(3)", limited=True),
    Call("rdma_create_id", ("ENOMEM", "ENODEV"), "rdma_create_id(3)", limited=True, softnd="full"),
    Call("rdma_bind_addr", ("EADDRINUSE", "EADDRNOTAVAIL", "ENODEV", "EACCES"), "rdma_bind_addr(3)"),
    Call("rdma_resolve_addr", ("ENODEV", "ENETUNREACH", "EHOSTUNREACH"), "rdma_resolve_addr(3)"),
    Call("rdma_resolve_route", ("EINVAL", "EHOSTUNREACH", "ETIMEDOUT"), "rdma_resolve_route(3)"),
    Call("rdma_create_qp", ("ENOMEM", "EINVAL", "ENOSPC", "EPERM"), "rdma_create_qp(3)", limited=True),
    Call("rdma_listen", ("EADDRINUSE", "ENOMEM", "EINVAL"), "rdma_listen(3)"),
    Call("rdma_get_request", ("EINVAL", "ENOMEM"), "rdma_get_request(3)", softnd="slow"),
    Call("rdma_connect", ("EINVAL", "ENOMEM", "ENETUNREACH", "ECONNREFUSED"), "rdma_connect(3)", softnd="slow"),
    Call("rdma_accept", ("EINVAL", "ENOMEM", "ECONNRESET"), "rdma_accept(3)", softnd="slow"),
    Call("rdma_reject", ("EINVAL", "ENOMEM"), "rdma_reject(3)"),
    Call("rdma_disconnect", ("EINVAL",), "rdma_disconnect(3)", softnd="slow"),
    Call("rdma_get_cm_event", ("EINTR", "ENOMEM", "EIO"), "rdma_get_cm_event(3)", softnd="slow"),
    Call("cancel", ("EINTR",), "IND2Overlapped::CancelOverlappedRequests", executors=(), softnd="slow"),
    Call("rdma_establish", ("EINVAL", "ECONNRESET"), "rdma_establish(3)", softnd="slow"),
)
#: The numbers of the present system, of the names that every call can have.
ERRNOS = (
    "EPERM", "EINTR", "EIO", "EAGAIN", "ENOMEM", "EACCES", "EFAULT", "EBUSY", "ENODEV", "EINVAL", "ENFILE", "EMFILE",
    "ENOSPC", "ENOSYS", "EOPNOTSUPP", "ENOBUFS", "EADDRINUSE", "EADDRNOTAVAIL", "ENETDOWN", "ENETUNREACH",
    "EHOSTUNREACH", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT",
)  # fmt: skip

_SENDS = ("send", "send_invalidate")
_TAGGED = ("write", "read", "compare_swap", "fetch_add")
_WINDOWS = ("bind_window", "invalidate")
#: In the order of enum fault_operation in softrdma/faults/scenario.h, where the first has the number 1.
OPERATIONS = (*_SENDS, *_TAGGED, *_WINDOWS, "receive")

_CODES = "IBTA vol. 1, 11.6.2; ibv_poll_cq(3)"
STATUSES = (
    Status("LOC_LEN_ERR", (*_SENDS, *_TAGGED, "receive"), _CODES),
    Status("LOC_QP_OP_ERR", OPERATIONS, _CODES),
    Status("LOC_PROT_ERR", (*_SENDS, *_TAGGED, "receive"), _CODES),
    Status("MW_BIND_ERR", _WINDOWS, _CODES),
    Status("BAD_RESP_ERR", (*_SENDS, *_TAGGED), _CODES, _SHIM),
    Status("LOC_ACCESS_ERR", ("receive",), _CODES, _SHIM),
    Status("REM_INV_REQ_ERR", (*_SENDS, *_TAGGED), _CODES),
    Status("REM_ACCESS_ERR", ("send_invalidate", *_TAGGED), _CODES),
    Status("REM_OP_ERR", (*_SENDS, *_TAGGED), _CODES),
    Status("RETRY_EXC_ERR", (*_SENDS, *_TAGGED), _CODES),
    Status("RNR_RETRY_EXC_ERR", _SENDS, _CODES),
)

VALUES = (
    Word("errno", ERRNOS, "the error number"),
    Word("status", tuple(status.name for status in STATUSES), "the status, as in ibv_poll_cq(3) without IBV_WC_"),
    Number("ms", 0, DAY_MS, "milliseconds"),
    Number("limit", 0, MOST, "the most objects that can exist at once"),
    Number("bytes", 0, MOST, "how many bytes are sent before"),
    Data("data", 256, "private data, which the program gets with the rejection"),
)

_NOT_THE_SHIM = (("shim", "the driver handles the packets, and no library sees them"),)
_NO_EVENTS = (("softnd", "NetworkDirect has no events of the adapter"),)
_NO_ALTERNATE_PATH = tuple((name, "a connection of soft0 and softnd has one path") for name in ("engine", "softnd"))
_NO_DATAGRAMS = tuple(
    (name, "soft0 and softnd have only reliable connections, which deliver each message once and in order")
    for name in ("engine", "softnd")
)
_UNORDERED = (
    "Linux drivers/infiniband/sw/rxe/rxe_resp.c, check_psn(): nobody looks at the number of a datagram; RFC 8085, 3.3, "
    "about the UDP below RoCE"
)

KINDS = (
    # ---- calls ----
    Kind(
        "call", "errno", "the call fails with an errno",
        "as before the call; of a list of requests, those before bad_wr are posted",
        "RETURN VALUE of the call's page of the manual", values=("errno",),
    ),
    Kind(
        "call", "slow", "the call takes ms longer", "as after the call",
        "siw_connect() of Linux opens a TCP connection inside rdma_connect(3); ibv_reg_mr(3) pins pages",
        values=("ms",),
    ),
    Kind(
        "call", "limit", "the call fails with ENOMEM if that many objects of its kind are there",
        "as before the call; it succeeds when one has gone", "ibv_query_device(3): max_qp, max_cq, max_mr …",
        values=("limit",),
    ),
    # ---- requests ----
    Kind(
        "request", "status", "the request ends with a status instead of success",
        "the queue pair is in the error state, and its outstanding requests are flushed",
        "IBTA vol. 1, 10.3.1 and 11.6.2; ibv_poll_cq(3)", values=("status",),
    ),
    Kind(
        "request", "delay", "the completion comes ms later", "as usual; the completions behind it wait for it",
        "IBTA vol. 1, 9.5: requests of a queue complete in order", values=("ms",),
    ),
    Kind(
        "request", "silent", "the completion comes without an event, although the queue is armed",
        "as usual; the queue stays armed",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c, flush_recv_wqe(), and siw_qp.c, siw_rqe_complete(), lose events",
    ),
    Kind(
        "request", "hold", "the request does not complete before ms, or never",
        "the completions behind it wait for it; the end of the connection flushes it", "a peer that no longer answers: "
        "IBTA vol. 1, 9.9.2.1 with a local ACK timeout of 0, which means infinite (ibv_modify_qp(3), timeout)",
        optional=("ms",),
    ),
    Kind(
        "request", "late_receive", "the receive is there for the peer only ms after it was posted",
        "as usual; the sender is told that the receiver is not ready, and tries again", "IBTA vol. 1, 9.7.5.2.8; "
        "ibv_modify_qp(3), rnr_retry", values=("ms",),
    ),
    # ---- messages ----
    Kind(
        "message", "delay", "the message is sent ms later", "as usual", "a congested network",
        values=("ms",), refused=_NOT_THE_SHIM,
    ),
    Kind(
        "message", "split", "the message arrives in pieces of the MTU, with a pause between them",
        "as usual; a program that looks into the memory before the completion sees a part",
        "IBTA vol. 1, 9.5: the data is there at the completion, not before; ibv_query_qp_data_in_order(3)",
        refused=_NOT_THE_SHIM,
    ),
    Kind(
        "message", "corrupt", "one byte of the data is wrong", "as usual: no status shows it",
        "wrong memory, or a wrong bit on a bus behind the CRC; for programs with checksums of their own",
    ),
    Kind(
        "message", "duplicate", "a datagram comes twice", "as usual", _UNORDERED,
        refused=_NO_DATAGRAMS, for_datagrams=True,
    ),
    Kind(
        "message", "reorder", "a datagram comes after the next one of its queue pair, or 100 ms later if there is none",
        "as usual; the completions behind it wait for it", _UNORDERED, refused=_NO_DATAGRAMS, for_datagrams=True,
    ),
    # ---- connections ----
    Kind(
        "connection", "refuse", "nobody listens there",
        "the connection does not exist; its queue pair can be used again",
        "rdma_get_cm_event(3): RDMA_CM_EVENT_REJECTED with ECONNREFUSED (iWARP) or 8 (InfiniBand)",
    ),
    Kind(
        "connection", "time_out", "nobody answers", "the connection does not exist",
        "rdma_get_cm_event(3): RDMA_CM_EVENT_UNREACHABLE with -ETIMEDOUT",
    ),
    Kind(
        "connection", "reject", "the peer says no, with private data", "the connection does not exist",
        "rdma_reject(3); RFC 5044, 7.1", optional=("data",),
    ),
    Kind(
        "connection", "lose", "the connection is lost when `bytes` bytes were sent, or at once",
        "the queue pair is in the error state, and its outstanding requests are flushed",
        "RFC 5044, 8.2; rdma_get_cm_event(3): RDMA_CM_EVENT_DISCONNECTED, or CONNECT_ERROR if it did not exist yet",
        optional=("bytes",), refused=_NOT_THE_SHIM,
    ),
    Kind(
        "connection", "disconnect", "the peer disconnects when `bytes` bytes were sent, or at once",
        "the queue pair is in the error state, and its outstanding requests are flushed", "rdma_disconnect(3)",
        optional=("bytes",),
    ),
    Kind(
        "connection", "mute", "the peer's host falls silent when `bytes` bytes were sent, or at once",
        "requests do not complete until the connection is given up", "a host that has lost its power",
        optional=("bytes",), refused=_NOT_THE_SHIM,
    ),
    # ---- the adapter ----
    Kind(
        "adapter", "port_down", "a port loses its link", "its state is down; requests complete or time out",
        f"IBTA vol. 1, 11.6.3; {_EVENTS}: IBV_EVENT_PORT_ERR",
    ),
    Kind(
        "adapter", "port_up", "a port has its link again", "its state is active",
        f"IBTA vol. 1, 11.6.3; {_EVENTS}: IBV_EVENT_PORT_ACTIVE",
    ),
    Kind(
        "adapter", "gid_change", "the table of GIDs has changed", "as usual", f"{_EVENTS}: IBV_EVENT_GID_CHANGE",
        refused=_NO_EVENTS,
    ),
    Kind(
        "adapter", "queue_pair_fatal", "a queue pair fails as a whole",
        "the queue pair is in the error state, and its outstanding requests are flushed",
        f"IBTA vol. 1, 11.6.3; {_EVENTS}: IBV_EVENT_QP_FATAL",
    ),
    Kind(
        "adapter", "completion_queue_error", "a completion queue fails",
        "no more completions come; its queue pairs are in the error state",
        f"IBTA vol. 1, 11.6.3; {_EVENTS}: IBV_EVENT_CQ_ERR",
    ),
    Kind(
        "adapter", "remove", "the adapter is gone",
        "every call fails with EIO, except those that destroy; outstanding requests are flushed",
        f"{_EVENTS}: IBV_EVENT_DEVICE_FATAL; rdma_get_cm_event(3): RDMA_CM_EVENT_DEVICE_REMOVAL",
    ),
    Kind(
        "adapter", "path_migrated", "a connection goes by its alternate path", "as usual",
        f"IBTA vol. 1, 17.2.8; {_EVENTS}: IBV_EVENT_PATH_MIG", refused=_NO_ALTERNATE_PATH,
    ),
    Kind(
        "adapter", "full_event_queue", "events of the adapter are lost", "as usual",
        "Linux drivers/infiniband/core/uverbs_main.c, ib_uverbs_async_handler(): no memory for an event loses it",
        refused=_NO_EVENTS,
    ),
)  # fmt: skip

PLACES = tuple(dict.fromkeys(kind.at for kind in KINDS))


def kinds_named(do: str) -> list[Kind]:
    """The kinds with a name: several if it can be at several places."""
    return [kind for kind in KINDS if kind.do == do]


def kinds_for(executor: str) -> list[Kind]:
    """What an executor can do."""
    return [kind for kind in KINDS if executor in kind.executors]


def why_not(
    executor: str, kind: Kind, call: str | None = None, status: str | None = None, errno: str | None = None
) -> str:
    """Why an executor cannot make such a fault, at this call, with this status or error number. "" if it can."""
    refused = dict(kind.refused)
    if executor in refused:
        return refused[executor]
    if executor == "softnd" and errno is not None and errno != SOFTND_ERRNO:
        return f"its calls fail with {SOFTND_ERRNO} only, the status of a full adapter or queue"
    found = call_named(call) if call is not None else None
    if found is not None and executor not in found.who(kind.do):
        if executor in found.who("slow"):
            return f"{found.name} never finds the adapter full"
        return f"{_INTERFACES[executor]} has no call {found.name}"
    if status is not None and not any(each.name == status and executor in each.executors for each in STATUSES):
        return f"its adapter never gives {status}"
    return ""


_INTERFACES = {"engine": "soft0", "shim": "verbs", "softnd": "NetworkDirect"}


def value_named(name: str) -> Number | Word | Data:
    return next(value for value in VALUES if value.name == name)


def call_named(name: str) -> Call | None:
    return next((call for call in CALLS if call.name == name), None)


def statuses_of(operation: str | None) -> list[str]:
    """The statuses with which an operation can fail, or with None all."""
    return [status.name for status in STATUSES if operation is None or operation in status.operations]


def one_of(words: Iterable[str]) -> str:
    """The words, as a sentence has them."""
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def values_text(kind: Kind) -> str:
    """The names of its values, those that can be left out in brackets."""
    return ", ".join([*kind.values, *(f"[{name}]" for name in kind.optional)])
