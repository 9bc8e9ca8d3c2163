"""Synthetic reports of `ndpy fleet`, always the same for the same arguments."""

from __future__ import annotations

import random
from collections.abc import Mapping

from ndpy.fleet.results import End, Kind, Machine, Measurement, Pattern, Quantity, Report, Suspect
from ndpy.fleet.schedule import circle

HOSTILE = "<script>document.title='taken'</script>"


def report(
    nodes: int = 8,
    *,
    rounds: int = 4,
    slow: Mapping[str, float] | None = None,
    dead: tuple[str, ...] = (),
    names: Mapping[int, str] | None = None,
    leaf: int = 16,
    seed: int = 0,
    scale: float = 1.0,
) -> Report:
    """A run of one rank on each of `nodes` machines n1, n2 …

    slow: the share of the expected bandwidth that these nodes have. Each is a suspect.
    dead: nodes whose measurements fail. Each is a suspect.
    names: other names for some nodes, by number from 0.
    scale: what each bandwidth is multiplied by.
    """
    chance = random.Random(seed)
    called = [(names or {}).get(number, f"n{number + 1}") for number in range(nodes)]
    slow = slow or {}
    ends = tuple(End(rank, node, "mlx5_0", (f"leaf l{rank // leaf}", "rail 0")) for rank, node in enumerate(called))
    measurements = []
    for turn, pairs in enumerate(_turns(nodes, rounds)):
        for one, other in pairs:
            share = slow.get(called[one], 1.0) * slow.get(called[other], 1.0)
            failed = called[one] in dead or called[other] in dead
            for source, target in ((one, other), (other, one)):
                for quantity in Quantity:
                    noise = 1 + chance.gauss(0, 0.02)
                    value = 2.1 / share * noise if quantity is Quantity.LATENCY else 97.5 * share * noise * scale
                    error = "the peer did not answer within 5 s" if failed else ""
                    measurements.append(
                        Measurement(
                            turn, Pattern.PAIRS, quantity, source, target, None if failed else round(value, 3), error
                        )
                    )
    suspects = [
        Suspect(
            *(Kind.NODE, node, (node,), Quantity.BANDWIDTH, share, 0.9987, 2 * rounds),
            reason=f"it sends {100 * (1 - share):.0f} % less than the others, which have 97.5 Gb/s.",
            remedy="look at its cable and its slot: `ndpy doctor` there compares the width of the slot",
        )
        for node, share in slow.items()
    ]
    suspects += [
        Suspect(
            *(Kind.RANK, node, (node,), None, None, 1.0, 2 * rounds),
            reason="it has not answered since round 0.",
            remedy="look at the machine's console, and start the rank again",
            problem="RETRY_EXC_ERR",
        )
        for node in dead
    ]
    machines = tuple(
        Machine(
            *(node, (rank,)),
            {"mlx5_0 firmware": "22.38.1002" if rank % 50 != 3 else "22.35.2000", "mlx5_0 MTU": "4096"},
            ({"check": "limits", "verdict": "PASS", "message": "memory may be locked without a limit", "remedy": ""},),
            {"mlx5_0 out_of_sequence": 12 * (rank % 7 == 5), "mlx5_0 rx_discards_phy": 0},
        )
        for rank, node in enumerate(called)
    )
    return Report(
        *("2026-03-01T08:00:00+00:00", 41.25, "mpi", "1.0", nodes, rounds),
        machines,
        ends,
        tuple(measurements),
        tuple(suspects),
        ("The budget of 10 minutes was enough.",),
    )


def _turns(nodes: int, rounds: int) -> list[tuple[tuple[int, int], ...]]:
    every = list(circle(nodes)) if nodes <= 512 else []
    if every:
        return every[:rounds]
    # The circle method for a large number takes time and memory for all of its rounds.
    half = nodes // 2
    return [tuple((place, half + (place + turn) % half) for place in range(half)) for turn in range(rounds)]
