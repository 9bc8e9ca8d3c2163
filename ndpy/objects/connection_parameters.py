"""What one end asks for in connect() and accept(): private data, read limits and a retry policy."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from ndpy import errors

if TYPE_CHECKING:
    from ndpy.vocabulary.info import AdapterInfo

# The unit of ack_timeout.
_TIMEOUT_UNIT_S = 4.096e-6


class ReadLimits(NamedTuple):
    """How many RDMA reads may run at once.

    Parameters:
        inbound: reads of the peer on this side's memory.
        outbound: reads of this side on the peer's memory.
    """

    inbound: int
    outbound: int


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """How often this side's adapter tries again before a message counts as lost, for connect() and accept().

    The policy holds for messages that this side sends. The peer chooses its own policy for messages that it sends. Only
    min_rnr_timer concerns messages that this side receives. A field that is None keeps the value that a connection has
    without a policy.

    Only adapters with RETRY_POLICY in info.capabilities have a policy: iWARP leaves retries to TCP, and NetworkDirect
    leaves them to its provider.

    Parameters:
        retry_count: 0 to 7. How often it tries again if the peer's adapter does not answer. Without a policy 7. On rxe,
            which never gives up with 7, ndpy sets 6 instead.
        rnr_retry_count: 0 to 7. How often it tries again if the peer has no receive posted. ENDLESS (7) never gives up.
            The peer's min_rnr_timer is the time between two tries. Without a policy it is at most 6, so that a message
            that nobody receives ends IO_TIMEOUT within 5 s. But it is ENDLESS if the peer says that it has a shared
            receive queue.
        min_rnr_timer: 0 to 31. A code for the time that the peer waits if there is no receive posted here. 1 is
            0.01 ms, 12 is 0.64 ms, 18 is 5.12 ms, 24 is 40.96 ms, 27 is 122.88 ms, 31 is 491.52 ms, 0 is 655.36 ms.
            Without a policy 27.
        ack_timeout: 0 to 31. The adapter tries again after 4.096 us times 2**ack_timeout without an answer. 0 waits for
            ever. Adapters round the time up. Without a policy the connection manager computes it.

    Attributes:
        ENDLESS: 7, with which rnr_retry_count never gives up.

    gives_up_s is the time that retry_count and ack_timeout make. QueuePair.retry is what a connection really has.

    Raises:
        ValueError: a value is out of range.
    Source: ibv_modify_qp(3), rdma_connect(3).
    """

    ENDLESS: ClassVar[int] = 7

    retry_count: int | None = None
    rnr_retry_count: int | None = None
    min_rnr_timer: int | None = None
    ack_timeout: int | None = None

    def __post_init__(self) -> None:
        for field, most in (("retry_count", 7), ("rnr_retry_count", 7), ("min_rnr_timer", 31), ("ack_timeout", 31)):
            value = getattr(self, field)
            if value is not None and not (isinstance(value, int) and 0 <= value <= most):
                raise ValueError(f"{field} is 0 to {most} or None, not {value!r}")

    @property
    def gives_up_s(self) -> float | None:
        """After how many seconds a request fails if the peer's adapter has fallen silent, for example because its host
        died.

        This is 4.096 us times 2**ack_timeout times (retry_count + 1). The time runs from the last answer, or from the
        request if none was outstanding. InfiniBand allows adapters to wait up to four times as long, and some have a
        lowest timeout of their own. rnr_retry_count has no part in it, because a peer that is not ready does answer.

        math.inf if ack_timeout is 0. None if retry_count or ack_timeout is None.
        Source: InfiniBand Architecture, volume 1, 9.7.6.1.3 and 9.9.2.1.1; ibv_modify_qp(3).
        """
        if self.retry_count is None or self.ack_timeout is None:
            return None
        return _TIMEOUT_UNIT_S * 2**self.ack_timeout * (self.retry_count + 1) if self.ack_timeout else math.inf


class ConnectionParameters(NamedTuple):
    """What one connect() or accept() asks for, checked against the adapter's limits."""

    private_data: bytes = b""
    read_limits: ReadLimits = ReadLimits(0, 0)
    retry: RetryPolicy = RetryPolicy()


def cap_read_limits(info: AdapterInfo, inbound: int | None, outbound: int | None) -> ReadLimits:
    """Lower the limits to the adapter's own. None stands for the adapter's limit. Raises ValueError below 0."""
    for limit in (inbound, outbound):
        if limit is not None and not (isinstance(limit, int) and limit >= 0):
            raise ValueError(f"a read limit is 0 or more, or None, not {limit!r}")
    return ReadLimits(
        min(info.max_inbound_read_limit if inbound is None else inbound, info.max_inbound_read_limit),
        min(info.max_outbound_read_limit if outbound is None else outbound, info.max_outbound_read_limit),
    )


def lower_limits(one: ReadLimits, other: ReadLimits) -> ReadLimits:
    """The lower limit of each direction."""
    return ReadLimits(min(one.inbound, other.inbound), min(one.outbound, other.outbound))


def check_private_data(private_data: bytes, max_length: int, operation: str) -> bytes:
    """Return the data as bytes. Raises TypeError unless they are a buffer, and LimitExceededError for more than
    max_length bytes.
    """
    if not isinstance(private_data, bytes):
        # bytes() would take a number for a length, and a list for numbers.
        try:
            memoryview(private_data).release()
        except TypeError:
            remedy = "; encode it, such as with .encode()" if isinstance(private_data, str) else ""
            raise TypeError(
                f"{operation}: private_data is bytes or another buffer, not {type(private_data).__name__}{remedy}"
            ) from None
    data = bytes(private_data)
    if len(data) > max_length:
        raise errors.LimitExceededError(f"{operation}: {len(data)} bytes of private data are more than {max_length}")
    return data
