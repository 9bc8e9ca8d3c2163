"""`--prolog`: one node against the machines of a report of before, within a minute.

It has no partner, so nothing is said about its cable's other end or about its speed there. Each adapter exchanges
messages with itself, in two processes: their bytes are compared.
"""

from __future__ import annotations

import collections
import contextlib
import datetime
import secrets
import threading
import time
from collections.abc import Sequence

import psutil

import ndpy
from ndpy.fleet import compare
from ndpy.fleet.engines.rendezvous import Message
from ndpy.fleet.measure import TOKEN_SIZE, Worker
from ndpy.fleet.results import End, Kind, Machine, Report, Suspect
from ndpy.tools.cli.channel import encode, printable
from ndpy.tools.cli.peers import PeerLost, PeerRefused

#: All of it. The process needs some seconds to start and to end.
LIMIT_S = 50.0
_PAIR_S = 20.0
_FACTS_S = 30.0
_DOCTOR = "run `ndpy doctor` there"


def examine(
    node: str, adapters: Sequence[str], reference: Report, *, others_too: bool, limit_s: float = LIMIT_S
) -> Report:
    """Look at this machine. The report's suspects are what is wrong with it.

    others_too: whether the machine should have the other adapters of the reference too.
    """
    began, clock = datetime.datetime.now(datetime.timezone.utc), time.monotonic()
    answers: dict[str, Message] = {}
    # An adapter that hangs does not keep the others from being looked at.
    looks = [threading.Thread(target=_look, args=(name, answers), daemon=True) for name in adapters]
    for look in looks:
        look.start()
    for look in looks:
        look.join(max(0.0, clock + limit_s - time.monotonic()))
    # Of this process: those that measure. One that hangs would stay.
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            child.kill()
    told = {name: answers.get(name, {"error": f"it said nothing for {limit_s:g} s"}) for name in adapters}
    facts, findings = compare.of_machine([{"ends": [{"adapter": name, **told[name]} for name in adapters]}])
    counters = {f"{name} {counter}": by for name in adapters for counter, by in told[name].get("counters", {}).items()}
    machine = Machine(node, (0,), facts, findings, counters)
    suspects = [
        *(
            _suspect(
                Kind.ADAPTER, f"{node}/{name}", node, f"{name} of {node} does not work: {answer['error']}", _DOCTOR
            )
            for name, answer in told.items()
            if "error" in answer
        ),
        *against(machine, reference, set(adapters), others_too=others_too),
    ]
    return Report(
        began=began.isoformat(timespec="seconds"),
        took_s=round(time.monotonic() - clock, 3),
        engine="prolog",
        version=ndpy.__version__,
        ranks=1,
        rounds=0,
        machines=(machine,),
        ends=tuple(End(0, node, name) for name in adapters),
        measurements=(),
        suspects=tuple(suspects),
    )


def _look(name: str, answers: dict[str, Message]) -> None:
    """What an adapter says of itself, and what is wrong with its messages to itself."""
    try:
        with contextlib.ExitStack() as stack:
            one, other = (stack.enter_context(contextlib.closing(Worker(name))) for _ in range(2))
            answer = one.call("facts", _FACTS_S)
            before = one.call("counters")["counters"]
            place = other.call("listen")
            common = {
                "token": encode(secrets.token_bytes(TOKEN_SIZE)),
                "timeout_s": _PAIR_S,
                "pings": 100,
                "write_s": 0.2,
            }
            other.begin("pair", **common)
            addresses = " ".join(place["addresses"])
            one.call("pair", _PAIR_S, addresses=addresses, port=place["port"], same_machine=True, **common)
            other.finish(_PAIR_S)
            after = one.call("counters")["counters"]
            grown = {each: value - before.get(each, 0) for each, value in after.items() if value > before.get(each, 0)}
            answers[name] = {**answer, "counters": grown}
    except (PeerLost, PeerRefused) as error:
        answers[name] = {"error": printable(str(error))}


def against(machine: Machine, reference: Report, adapters: set[str], *, others_too: bool) -> list[Suspect]:
    """Compare this machine with most machines of the report. The suspects of the report do not count."""
    others = [each for each in reference.machines if each.node not in reference.drain() and each.facts]
    own = {_adapter(name) for name in machine.facts}
    found: list[Suspect] = []

    def unlike(reason: str, remedy: str, problem: str = "") -> None:
        found.append(_suspect(Kind.NODE, machine.node, machine.node, reason, remedy, problem))

    for adapter, count in sorted(
        collections.Counter(each for other in others for each in {*map(_adapter, other.facts)}).items()
    ):
        if others_too and adapter not in adapters and 2 * count > len(others):
            unlike(f"{machine.node} has no {adapter}, and {count} of {len(others)} machines have it", _DOCTOR)
    for name in sorted({name for other in others for name in other.facts if _adapter(name) in own}):
        (common, count), *_ = collections.Counter(
            each.facts[name] for each in others if name in each.facts
        ).most_common()
        value = machine.facts.get(name, "unknown")
        if value != common and 2 * count > len(others):
            unlike(
                f"{name} is {value} on {machine.node}, and {common} on {count} of {len(others)} machines",
                "make it like the others, or take the machine out",
            )
    for finding in machine.findings:
        check, verdict = finding.get("check", ""), finding.get("verdict", "")
        like = sum(
            any(each.get("check") == check and each.get("verdict") == verdict for each in other.findings)
            for other in others
        )
        if verdict != "PASS" and 2 * like <= len(others):
            unlike(f"{check}: {finding.get('message', '')}", finding.get("remedy", ""), finding.get("problem", ""))
    return found


def _adapter(fact: str) -> str:
    """The adapter of which a fact is."""
    return fact.partition(" ")[0]


def _suspect(kind: Kind, name: str, node: str, reason: str, remedy: str, problem: str = "") -> Suspect:
    return Suspect(kind, name, (node,), None, None, 1.0, 1, reason, remedy, problem)
