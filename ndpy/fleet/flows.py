"""What a rank measures in a pattern: many ends write at the same time, to one of them or around a circle.

An end that receives takes all connections first, and then tells all senders to begin. Sending and receiving have a
thread each, because around a circle each end waits for the next one.
"""

from __future__ import annotations

import contextlib
import threading
import time

import ndpy
from ndpy.fleet.pair import Fault, Pair
from ndpy.tools.cli.serving import Answer

#: The share of the time in which the senders have to come. The receiver then begins with those that are there.
_COMING = 0.5


def run(
    adapter: ndpy.Adapter,
    listener: ndpy.Listener | None,
    token: bytes,
    timeout_s: float,
    senders: int,
    address: tuple[str, int] | None,
    write_s: float,
) -> Answer:
    """Receive from this many senders, and write to `address` if there is one.

    Returns the bandwidth of the writes, or None, and what went wrong with sending and with receiving, or "".
    """
    began = time.monotonic()
    answer: Answer = {"bandwidth_gbps": None, "sending": "", "receiving": ""}

    def receive() -> None:
        try:
            assert listener is not None
            _receive(adapter, listener, token, began, timeout_s, senders)
        except (ndpy.NdpyError, OSError, Fault) as error:
            answer["receiving"] = str(error)

    receiving = threading.Thread(target=receive, daemon=True)
    if senders:
        receiving.start()
    if address is not None:
        try:
            with Pair(adapter, token, began + timeout_s) as pair:
                pair.connect(address)
                answer["bandwidth_gbps"] = pair.flow(write_s)
        except (ndpy.NdpyError, OSError, Fault) as error:
            answer["sending"] = str(error)
    if senders:
        # Each of its waits ends at the deadline.
        receiving.join()
    return answer


def _receive(
    adapter: ndpy.Adapter, listener: ndpy.Listener, token: bytes, began: float, timeout_s: float, senders: int
) -> None:
    with contextlib.ExitStack() as stack:
        pairs: list[Pair] = []
        try:
            for _ in range(senders):
                pair = stack.enter_context(Pair(adapter, token, began + _COMING * timeout_s))
                pair.accept(listener)
                pair.welcome()
                pairs.append(pair)
        except ndpy.NdpyError:
            if not pairs:
                raise
        for pair in pairs:
            pair.deadline = began + timeout_s
            pair.begin()
        for pair in pairs:
            pair.take_flow()
        if len(pairs) < senders:
            raise Fault(f"{senders - len(pairs)} of {senders} senders did not come")
