"""The counters of an adapter's ports: which of them mean errors, and what they did in a time."""

from __future__ import annotations

import re

#: For each port's number the counters by name.
Counters = dict[int, dict[str, int]]

#: They count 4 bytes each (InfiniBand Architecture, volume 1, 16.1.3.5).
UNITS_OF_4_BYTES = frozenset({"port_xmit_data", "port_rcv_data"})

# Parts of the names that the kernel's drivers give to counters of what should not happen.
_ERRORS = re.compile(
    r"(?<![a-z])err|drop|discard|duplicate|out_of_(?:seq|buffer)|timeout|retrans|downed|overrun|nak|cnp|ecn_mark"
    r"|recover|integrity"
)

# Those of lost, damaged and repeated packets.
_LOSSES = re.compile(
    r"seq_err|sequence|out_of_seq|oos_|retrans|retry|retries|timeout|discard|drop|duplicate|dup_req|missing_resp"
    r"|implied_nak"
    r"|symbol|crc|downed|error_recovery|integrity|overrun|rcv_err|send_err|constraint"
)
# They have such words too, and a healthy adapter counts them: its receiver had no buffer, or a switch was busy.
_NO_LOSSES = re.compile(r"rnr|out_of_buffer|no_buffer|pause|pfc|ecn|cnp|vl15|slow_restart")


def is_error(name: str) -> bool:
    """Whether a counter counts what should not happen, such as lost packets.
    The driver decides what its counters mean.
    """
    return _ERRORS.search(name.lower()) is not None


def is_loss(name: str) -> bool:
    """Whether a counter counts what a bad cable, port or adapter causes: packets that are lost, damaged or repeated.

    What a slow receiver, congestion or a program's mistake causes is not among them.
    """
    return _LOSSES.search(name.lower()) is not None and _NO_LOSSES.search(name.lower()) is None


def changes(before: Counters, after: Counters) -> Counters:
    """What each counter did between two readings, without those that have not changed."""
    found = {
        port: {name: value - before.get(port, {}).get(name, 0) for name, value in counters.items()}
        for port, counters in after.items()
    }
    return {port: {name: by for name, by in counters.items() if by} for port, counters in found.items()}
