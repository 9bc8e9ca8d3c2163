"""Checks, the groups of checks, and verdicts."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ndpy import Capability

if TYPE_CHECKING:
    from ndpy.tools.cli.smoke.testbed import Testbed

#: The groups in the order in which they run. Each value is the module of ndpy.tools.cli.smoke.checks with the group's
#: checks.
GROUPS = {
    "load": "load",
    "enumerate": "load",
    "register": "memory",
    "windows": "windows",
    "link": "link",
    "connect": "connect",
    "send-receive": "messages",
    "read-write": "one_sided",
    "ordering": "ordering",
    "notification": "notification",
    "disconnect": "disconnect",
    "refusals": "refusals",
    "performance": "performance",
}

#: A check returns what it saw, for the report. If it fails, it raises Failure, or lets an exception of the library
#: pass.
Body = Callable[["Testbed"], str]


class Verdict(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    KNOWN = "KNOWN"
    SKIP = "SKIP"


class Failure(Exception):
    """The adapter does not do what the check claims."""


class Skip(Exception):
    """The adapter does not claim the capability that the check needs."""


@dataclass(frozen=True)
class Check:
    """A named claim about an adapter. It is skipped unless AdapterInfo.capabilities has all of `needs`."""

    group: str
    name: str
    claim: str
    needs: tuple[Capability, ...]
    body: Body

    @property
    def full_name(self) -> str:
        return f"{self.group}/{self.name}"


@dataclass
class Result:
    """The outcome of a check."""

    check: Check
    verdict: Verdict
    reason: str
    seconds: float = 0.0
    reference: str = ""
    figures: dict[str, float] = field(default_factory=dict)


_registered: list[Check] = []


def check(group: str, name: str, *, needs: tuple[Capability, ...] = ()) -> Callable[[Body], Body]:
    """Register a function as a check. Its docstring is the claim."""
    assert group in GROUPS, group

    def register(body: Body) -> Body:
        claim = " ".join((inspect.getdoc(body) or "").split()).rstrip(".")
        assert claim, f"{group}/{name} claims nothing"
        _registered.append(Check(group, name, claim, needs, body))
        return body

    return register


def load(groups: Iterable[str] = ()) -> list[Check]:
    """The checks of these groups in the order in which they run. Without a group: all checks."""
    for module in dict.fromkeys(GROUPS.values()):
        importlib.import_module(f"ndpy.tools.cli.smoke.checks.{module}")
    wanted = set(groups) or set(GROUPS)
    order = list(GROUPS)
    return sorted((c for c in _registered if c.group in wanted), key=lambda c: order.index(c.group))
