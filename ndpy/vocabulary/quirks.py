"""The quirks: what drivers and transports do differently from others, or differently from their specification.

Three readers use it:

- ndpy's own code asks `Quirk.X in adapter._quirks`. It never compares names of drivers.
- The smoke test calls a failure KNOWN if the table lists it for this driver, kernel and check. Any other failure is a
  FAIL.
- The tests skip, or expect to fail, what the table says.

Most entries are facts about a transport, or faults of a driver that no release of ndpy can correct. If ndpy works
around one, `workaround` says how. Then a check passes on that driver too, and the entry excuses no failure.
tests/verbs/programs has small C programs that show what the drivers do by themselves.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import partial

from ndpy.vocabulary.info import AdapterInfo


@dataclass(frozen=True)
class Facts:
    """What is known of a quirk.

    Attributes:
        summary: what these adapters do, for reports.
        reference: where that is written down, or which code does it.
        driver, transport: the adapters that have it. One of the two is set, to a value of AdapterInfo.
        except_drivers: the drivers of that transport that do not have it.
        first, last: the oldest and the newest kernel that has it. () if there is no limit. If nobody knows which kernel
            brought it, `first` is the oldest kernel on which it was seen.
        checks: the checks of the smoke test that find it.
        symptom: a part of the reason with which these checks fail. A failure with another reason has another cause.
        workaround: how ndpy spares its users the effect. "" if it does not.
        programs: the programs of tests/verbs/programs that show it, each with its arguments.
        crashes_machine: whether the machine crashes when somebody tries it.
    """

    summary: str
    reference: str
    driver: str = ""
    transport: str = ""
    except_drivers: tuple[str, ...] = ()
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    checks: tuple[str, ...] = ()
    symptom: str = ""
    workaround: str = ""
    programs: tuple[str, ...] = ()
    crashes_machine: bool = False

    def is_of(self, driver: str, transport: str) -> bool:
        """Whether adapters with this driver or this transport have it."""
        if self.driver:
            return driver == self.driver
        return transport == self.transport and driver not in self.except_drivers

    def is_in(self, release: str) -> bool:
        """Whether this kernel is known to have it."""
        kernel = kernel_version(release)
        return kernel >= self.first and not self.is_past(release)

    def is_past(self, release: str) -> bool:
        """Whether this kernel is too new to have it."""
        return bool(self.last) and kernel_version(release)[: len(self.last)] > self.last


_rxe = partial(Facts, driver="rdma_rxe")
_siw = partial(Facts, driver="siw", first=(5, 3))
_iwarp = partial(Facts, transport="iWARP", except_drivers=("softverbs",))


class Quirk(enum.Enum):
    """The entries. Each name begins with the driver or the transport."""

    # ---- rxe ----

    RXE_WINDOW_BOUNDS = _rxe(
        "rxe does not enforce a window's bounds: the peer reaches all of the region that the window is bound to",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c, check_rkey(): the range is compared with the region's, not the "
        "window's; seen on 6.1.192, 6.12.107 and 7.2.13",
        first=(5, 14),
        checks=(
            "windows/write-past-end",
            "windows/write-before-start",
            "windows/write-across-end",
            "windows/read-past-end",
        ),
        symptom="was not refused",
    )
    RXE_INVALIDATES_ANY_WINDOW = _rxe(
        "rxe does not ask whose window a message invalidates",
        "Linux drivers/infiniband/sw/rxe/rxe_mw.c, rxe_check_invalidate_mw(); seen on 6.1, 6.12.107 and 7.2.13",
    )
    RXE_INVALIDATE_OF_UNBOUND_WINDOW = _rxe(
        "rxe panics when a message invalidates a window that is not bound",
        "Linux drivers/infiniband/sw/rxe/rxe_mw.c, rxe_do_invalidate_mw(): it drops a reference to a queue pair that "
        "the window does not have; seen on 6.1, and 6.12.107 and 7.2.13 have the same code",
        crashes_machine=True,
    )
    RXE_WINDOW_OUTLIVES_QUEUE_PAIR = _rxe(
        "rxe hangs for 51 s when a queue pair is destroyed while a window is bound to it",
        "Linux drivers/infiniband/sw/rxe/rxe_pool.c, __rxe_cleanup(): it waits for the window's reference, and warns",
        workaround="ndpy frees the windows first",
    )
    RXE_NEXT_POLL_GOES_TOO_FAR = _rxe(
        "rxe's part of libibverbs reads completions that do not exist, and gives its lock back twice, when an extended "
        "completion queue is polled to its end",
        "rdma-core providers/rxe/rxe.c, cq_next_poll(): until rdma-core 55 it counts the last entry twice, until 59 it "
        "unlocks; seen with rdma-core 44",
        workaround="ndpy takes each completion by an ibv_start_poll(3) of its own",
    )
    RXE_SILENT_REQUEST_FAILURES = _rxe(
        "rxe does not notify for solicited completions when a request of the initiator queue fails",
        "Linux drivers/infiniband/sw/rxe/rxe_comp.c, do_complete(): posted as not solicited",
        workaround="ndpy looks for failed completions every 50 ms while that is asked for",
    )
    RXE_SILENT_FLUSHED_RECEIVES = _rxe(
        "rxe does not notify for solicited completions when receives are flushed",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c, flush_recv_wqe(): posted as not solicited; seen on 6.12.107 and "
        "7.2.13",
        first=(6, 12),
        checks=("notification/failure-tells",),
        symptom="not finished within",
        workaround="ndpy looks for failed completions every 50 ms while that is asked for",
        programs=("failure_notifies",),
    )
    RXE_FENCE_WAITS_FOR_ITSELF = _rxe(
        "rxe never ends a request with READ_FENCE that it has to send again, because the receive came late or a packet "
        "was lost, if the request is a read or an atomic operation, or if one of these is behind it",
        "Linux drivers/infiniband/sw/rxe/rxe_req.c, rxe_wqe_is_fenced(): a request that was sent once counts among the "
        "reads that the fence waits for; seen on 6.1.192 and 7.2.13",
        first=(6, 1),
        programs=("fenced_retry",),
    )
    RXE_FLUSHES_ITS_OWN_FAULT = _rxe(
        "rxe reports a request that fails by its own memory as flushed, as those behind it",
        "Linux drivers/infiniband/sw/rxe/rxe_comp.c, flush_send_wqe(): the status that rxe_requester() has set is "
        "dropped; seen on 6.12.107 and 7.2.13",
        first=(6, 12),
        checks=("read-write/own-unknown-token",),
        symptom="completed CANCELED",
        workaround="ndpy looks at the memory of the first flushed request",
        programs=("local_fault",),
    )
    RXE_ONE_STATUS_FOR_PORT_AND_MEMORY = _rxe(
        "rxe reports IBV_WC_LOC_QP_OP_ERR for a request that it cannot send, whether its memory or the port is the "
        "reason",
        "Linux drivers/infiniband/sw/rxe/rxe_req.c, rxe_requester()",
        workaround="ndpy looks at the state of the port",
    )
    RXE_KEEPS_LATE_RECEIVES = _rxe(
        "rxe flushes receives when a queue pair enters the error state, but not those that are posted later",
        "rdma-core providers/rxe/rxe.c, rxe_post_recv(): no call tells the kernel of a receive",
        workaround="ndpy sets the state again after each such receive",
    )
    RXE_ACCESS_EVENT_COMES_EARLY = _rxe(
        "rxe reports a peer's wrong access before it has answered the peer; it ends the queue pair itself after that",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c",
        workaround="ndpy leaves the queue pair to the driver",
    )
    RXE_ANSWERS_LATE = _rxe(
        "rxe completes a receive, or fails it, before it answers the message, sends no answer from a queue pair that "
        "is in the error state by then, and may handle an answer after the peer's disconnect",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c, do_complete(): the completion is posted before the state is "
        "looked at; seen on 7.2.13, where a work queue does it",
        workaround="ndpy tells the peer before it flushes, and waits up to 0.2 s for answers",
    )
    RXE_RETRIES_FOR_EVER = _rxe(
        "rxe tries again for ever if the retry count is 7, so that a request to a dead host never ends",
        "Linux drivers/infiniband/sw/rxe/rxe_comp.c, rxe_completer(): a count of 7 is never lowered; seen on 6.1 and "
        "7.2.13",
        workaround="ndpy sets 6 where 7 is asked for",
    )
    RXE_TELLS_NO_FAILURES = _rxe(
        "rxe of some kernels tells nobody on this side when a peer's wrong request has made a queue pair fail",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c; seen on 6.1, while siw reports each",
    )
    RXE_TELLS_NO_LAST_RECEIVE = _rxe(
        "rxe of some kernels does not tell when a failed queue pair takes no more receives of its shared receive queue",
        "Linux drivers/infiniband/sw/rxe/rxe_resp.c, rxe_drain_req_pkts(): no IB_EVENT_QP_LAST_WQE_REACHED; seen on "
        "6.1, while 7.2.13 tells it",
        last=(6, 1),
        workaround="ndpy waits for it only where it is told",
    )
    RXE_STAYS_DRAINED = _rxe(
        "on rxe, a queue pair that changes from SQD back to RTS does not begin the requests that waited, until another "
        "one is posted",
        "Linux drivers/infiniband/sw/rxe/rxe_qp.c, rxe_qp_from_attr(): the change to RTS starts no task; seen on 6.1",
    )
    RXE_BINDS_AGAIN = _rxe(
        "rxe binds a window once more when it repeats a request before the bind, because a packet was lost. The second "
        "bind fails. Then 6.1 sends nothing more and ends nothing, without an error, and 7.2 cancels all requests of "
        "the connection",
        "Linux drivers/infiniband/sw/rxe/rxe_req.c, req_retry(): it goes back past binds that are done, and "
        "rxe_requester() does them again; seen on 6.1.192 and 7.2.13",
        first=(5, 14),
        workaround="ndpy.aio binds no windows on rxe, and registers what the peer may use",
    )
    RXE_SPINS_ON_LONG_PACKETS = _rxe(
        "rxe sends a packet again and again if the path no longer carries it: when the MTU shrinks below that of "
        "a connection, one processor is busy and no request ends until the queue pair is closed",
        "Linux drivers/infiniband/sw/rxe/rxe_net.c, rxe_send(): each failure is reported as EAGAIN; seen on 6.1, "
        "while 7.2.13 flushes the request",
        last=(6, 1),
    )
    RXE_CLOSED_PORT_ENDS_MANAGER = _rxe(
        "a datagram of the connection manager that meets a closed port leaves rxe's manager dead for good",
        "Linux drivers/infiniband/sw/rxe/rxe_net.c",
        workaround="ndpy tells a peer of the end of a connection when the port is active again",
    )
    RXE_ON_DEMAND_OFFSET = _rxe(
        "rxe's on-demand paging moves data to and from the start of the page, whatever the address",
        "Linux drivers/infiniband/sw/rxe/rxe_odp.c, __rxe_odp_mr_copy(): the offset in the page is not added; seen on "
        "7.2.13",
        first=(7, 2),
        checks=("register/on-demand",),
        symptom="memory on demand",
        workaround="ndpy pins the memory",
        programs=("on_demand offset", "on_demand across"),
    )

    # ---- siw ----

    SIW_NEVER_SOLICITED = _siw(
        "siw never notifies for solicited messages",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_rqe_complete(): a receive counts as SIGNALLED, never as "
        "SOLICITED; seen on 6.1 and 7.2.13",
        checks=("notification/solicited",),
        symptom="not finished within",
    )
    SIW_IGNORES_READ_LIMIT = _siw(
        "siw's server serves as many reads at once as the client asks for, whatever limit it was accepted with",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_accept(): relaxed_ird_negotiation; seen on 6.1 and 7.2.13",
        checks=("connect/read-limits",),
        symptom="this side was told",
    )
    SIW_SWAPS_READ_LIMITS = _siw(
        "siw reports the read limits of a reply as the server sees them",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_proc_mpareply()",
        workaround="ndpy exchanges the two",
    )
    SIW_READS_WITHOUT_RIGHT = _siw(
        "siw lets a peer read a region that has no right to be read",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c, siw_qp_sq_proc_tx(): a read response is checked for no right; "
        "seen on 6.1 and 7.2.13",
        checks=("read-write/read-of-writable",),
        symptom="was not refused",
    )
    SIW_LEAVES_FIRST_MESSAGE = _siw(
        "siw's server may leave the client's first message in the socket until more comes: the message can arrive "
        "after the answer to the client was sent, and before siw watches the socket",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_accept(): siw_qp_socket_assoc() follows siw_send_mpareqrep(); "
        "seen on 6.1 between two hosts, once in 25 connections",
    )
    SIW_FLUSHES_A_QUEUED_READ_TWICE = _siw(
        "siw completes a read twice when it flushes one that it has taken up and not begun to send",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_sq_flush(): such a read is in the list of outstanding reads, "
        "and the current request too; seen on 6.1",
        workaround="ndpy drops the second completion",
    )
    SIW_KEEPS_REQUESTS_OF_A_CLOSING_QUEUE_PAIR = _siw(
        "siw never completes what is queued when a connection closes and no request is being sent",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_qp_nextstate_from_close(): it flushes only if the current "
        "request is not idle; seen on 6.1",
        workaround="ndpy cancels the requests",
    )
    SIW_CANCELS_BEFORE_REFUSALS = _siw(
        "siw cancels the receives of a client that is refused, which may be seen before the refusal",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_cm_work_handler(): siw_qp_llp_close() in the thread that hands "
        "the refusal to another one; seen on 6.1",
        workaround="ndpy.aio waits for the refusal",
    )
    SIW_OVERTAKES_READS = _siw(
        "siw completes what was posted after a read ahead of that read, and cannot fence a read",
        "Linux drivers/infiniband/sw/siw/siw_qp.c",
        workaround="ndpy fences all other requests",
    )
    SIW_READS_INTO_THE_FIRST_ELEMENT = _siw(
        "siw fills the first element of a read and reports success, however many elements it has",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_activate_tx_from_sq(): num_sge of a read is set to 1, as "
        "max_sge_rd says; seen on 6.1",
        workaround="ndpy refuses a read into more elements than info.max_read_sge",
    )
    SIW_STUMBLES_OVER_EMPTY_ELEMENTS = _siw(
        "siw panics when a request sends several elements and one of no bytes precedes another one",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c, siw_tx_hdt(): it looks at the memory of each element, and one of "
        "no bytes has none; seen on 6.1",
        workaround="ndpy leaves these elements out",
    )
    SIW_ANSWERS_EMPTY_READS_WITH_DATA = _siw(
        "siw answers a read of no bytes that waits behind another request with as many bytes as the other, and the "
        "connection ends",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_activate_tx(): it leaves the length and the memory of the last "
        "request that it sent; seen on 6.1",
    )
    SIW_GARBLES_SHORT_DATA_ACROSS_PAGES = _siw(
        "siw sends wrong bytes if the data has at most 24 to 32 bytes, crosses a page, and is not sent within the call "
        "that posts it: so is the answer to every such read",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c, siw_try_1seg(): it takes the length of the second part for that "
        "of the first; seen on 6.1",
    )
    SIW_KEEPS_ADDRESSES = _siw(
        "siw registers memory at its own address, whatever address was asked for",
        "Linux drivers/infiniband/sw/siw/siw_verbs.c, siw_reg_user_mr(): rnic_va is not used; seen on 6.1",
        workaround="ndpy does not claim Capability.CHOSEN_ADDRESS",
    )
    SIW_REFUSES_A_PAGE = _siw(
        "siw's library cannot create the queue whose pages begin at offset 0x90000 of those that a context shares with "
        "the driver, nor any later one: about 36 queue pairs at once",
        "Linux include/uapi/rdma/siw-abi.h, SIW_INVAL_UOBJ_KEY, and rdma_user_mmap_entry_insert(), which gives out "
        "that offset too; rdma-core providers/siw/siw.c; seen on 6.1",
        first=(5, 5),
        workaround="ndpy has a completion queue of its own around that offset",
    )
    SIW_TELLS_NO_LAST_RECEIVE = _siw(
        "siw does not tell when a failed queue pair takes no more receives of its shared receive queue",
        "Linux drivers/infiniband/sw/siw/siw_qp.c, siw_rq_flush(): no IB_EVENT_QP_LAST_WQE_REACHED; seen on 6.1",
        workaround="ndpy waits for it only where it is told",
    )
    SIW_CONNECT_BLOCKS = _siw(
        "siw opens the TCP connection inside rdma_connect(): with a silent host the call takes until TCP gives up, up "
        "to 127 s, and ibv_destroy_qp() waits for it",
        "Linux drivers/infiniband/sw/siw/siw_cm.c, siw_connect(): kernel_bindconnect() is called in blocking mode; "
        "seen on 6.1",
        workaround="ndpy makes the call in a thread of its own, and ends it when the attempt is given up",
    )

    SIW_FORGETS_SIGNALING = _siw(
        "siw's ibv_query_qp() says of every queue pair that all its requests are signaled",
        "Linux drivers/infiniband/sw/siw/siw_verbs.c, siw_query_qp(): it leaves sq_sig_type 0, IB_SIGNAL_ALL_WR; seen "
        "on 6.1",
        workaround="the shim of `ndpy faults` keeps what the queue pair was made with",
    )

    SIW_RESIZES_NO_QUEUE = _siw(
        "siw cannot resize a completion queue. With the shim of `ndpy faults`, a queue needs room for the silent "
        "requests too",
        "Linux drivers/infiniband/sw/siw/siw_main.c, siw_device_ops: no resize_cq; seen on 6.1",
        workaround="ndpy does not claim Capability.RESIZE_COMPLETION_QUEUE",
    )

    SIW_SPLITS_SILENT_MESSAGES = _siw(
        "siw sends a silent message of a page or more without copying it, in three TCP segments instead of one",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c, siw_qp_prepare_tx(): use_sendpage from SENDPAGE_THRESH on, if "
        "the request is not signalled; seen on 6.1",
        workaround="`ndpy perf send_lat` asks for a completion of each message of that size",
    )

    # ---- iWARP ----
    #
    # softverbs has fewer of these quirks, also towards other iWARP ends: it asks them what they took by reads of no
    # bytes. The exception is a peer that serves no reads.

    IWARP_READ_SINK_NEEDS_REMOTE_WRITE = _iwarp(
        "on iWARP the answer to a read is written to the sink by its remote token, so the sink needs the right "
        "REMOTE_WRITE",
        "RFC 5040: a Read Response is a tagged message to the sink",
        workaround="Access.READ_SINK adds the right",
    )
    IWARP_KERNEL_MOVES_QUEUE_PAIRS = _iwarp(
        "on iWARP the kernel moves a queue pair through its states, together with the TCP connection",
        "Linux drivers/infiniband/core/iwcm.c",
        workaround="ndpy moves queue pairs of other transports only",
    )
    IWARP_ATTEMPT_USES_QUEUE_PAIR_UP = _iwarp(
        "on iWARP a refused connection ends its queue pair for good",
        "Linux drivers/infiniband/core/iwcm.c",
    )
    IWARP_MANAGER_ONLY = _iwarp(
        "iWARP connects only through a connection manager",
        "RFC 5044: a queue pair takes over a TCP connection after the start-up frames",
    )
    IWARP_UP_AT_THE_REPLY = _iwarp(
        "on iWARP a connection is up when the server's reply arrives: nothing is left to complete or to refuse after "
        "that",
        "RFC 5044: the start-up is one frame from each end",
        workaround="ndpy ends a connection whose offer is turned down",
    )
    IWARP_CLIENT_SENDS_FIRST = _iwarp(
        "on iWARP the first message has to be the client's",
        "RFC 5044, section 7.1.2",
    )
    IWARP_DISCONNECT_SENDS_THE_QUEUE = _iwarp(
        "iWARP sends what is queued before it disconnects, unless the queue pair is in the error state by then",
        "Linux drivers/infiniband/core/iwcm.c, iw_cm_disconnect()",
    )
    IWARP_REFUSALS_ARE_ERRNOS = _iwarp(
        "on iWARP the reason of a refusal is an errno, not one of InfiniBand's connection manager",
        "Linux drivers/infiniband/core/cma.c, cma_iw_handler()",
    )
    IWARP_DESTROY_WAITS = _iwarp(
        "on iWARP the kernel holds rdma_destroy_id() of an attempt until the peer has answered, or for ten seconds, "
        "and ibv_destroy_qp() of its queue pair as long",
        "Linux drivers/infiniband/core/iwcm.c, destroy_cm_id(): it waits for connect_wait, which siw_cm.c wakes after "
        "MPAREP_TIMEOUT; siw_verbs.c, siw_destroy_qp(): it waits for qp_free, and iw_cm_connect() has a reference; "
        "seen on 6.1",
        workaround=(
            "ndpy calls rdma_destroy_id() in a thread of its own, and ndpy.aio goes on to the next address meanwhile. "
            "Closing the queue pair waits"
        ),
    )
    IWARP_NO_ACKNOWLEDGEMENT = _iwarp(
        "iWARP acknowledges no write and no send: they complete when TCP has them, before the peer has judged them",
        "RFC 5040: only reads are answered",
    )
    IWARP_NO_RECEIVER_NOT_READY = _iwarp(
        "iWARP has no way to say that a receiver is not ready",
        "RFC 5041",
    )
    IWARP_NO_IMMEDIATE_DATA = _iwarp(
        "iWARP has no immediate data",
        "RFC 5040; the extension of RFC 7306 is not in siw",
        except_drivers=(),
    )
    IWARP_NO_PATH_MTU = _iwarp(
        "on iWARP there is no path MTU: TCP decides how large packets are",
        "RFC 5044: segments follow TCP's",
        except_drivers=(),
    )
    IWARP_KEEPS_UNCONNECTED_REQUESTS = _iwarp(
        "siw flushes nothing before there was a connection",
        "Linux drivers/infiniband/sw/siw/siw_qp.c; ndpy takes it to be so on all of iWARP",
        workaround="ndpy cancels the requests",
    )
    IWARP_KEEPS_LATE_REQUESTS = _iwarp(
        "siw flushes when a queue pair enters the error state, and does not complete what is posted after that",
        "Linux drivers/infiniband/sw/siw/siw_verbs.c; ndpy takes it to be so on all of iWARP",
        workaround="ndpy cancels the requests",
    )
    IWARP_ONE_STATUS_FOR_LOSS_AND_MEMORY = _iwarp(
        "siw reports IBV_WC_LOC_QP_OP_ERR for a request that it cannot send, whether its memory or the loss of the "
        "connection is the reason",
        "Linux drivers/infiniband/sw/siw/siw_qp_tx.c; ndpy takes it to be so on all of iWARP",
        workaround="ndpy looks at the request's memory",
    )


#: The drivers of adapters in software.
_SOFTWARE = frozenset({"rdma_rxe", "siw", "softverbs", "softnd.dll"})


def is_software(info: AdapterInfo) -> bool:
    """Whether ndpy knows that this adapter is not hardware."""
    return info.driver in _SOFTWARE


def kernel_version(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a kernel release: (6, 1, 0) for "6.1.0-50-amd64"."""
    match = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def quirks_of(info: AdapterInfo, release: str | None = None) -> frozenset[Quirk]:
    """Return the quirks that ndpy has to expect on an adapter, in this kernel or in the given one.

    `first` is often only the oldest kernel that somebody looked at, so older kernels count too.
    """
    if release is None:
        # Imported here, because `import ndpy` does not need it.
        import platform

        release = platform.release()
    return frozenset(
        quirk for quirk in Quirk if quirk.value.is_of(info.driver, info.transport) and not quirk.value.is_past(release)
    )


def known(driver: str, release: str) -> list[Facts]:
    """Return the quirks of a driver that this kernel is known to have. The list is empty if the table does not name the
    driver.
    """
    return [quirk.value for quirk in Quirk if quirk.value.driver == driver and quirk.value.is_in(release)]
