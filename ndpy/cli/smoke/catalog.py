"""What a check is, the groups they stand in, and their verdicts."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ndpy import Capability

if TYPE_CHECKING:
    from ndpy.cli.smoke.lab import Lab

#: Group by group in the order of running, with the module of ndpy.cli.smoke.checks that has its checks.
GROUPS = {
    "load": "load",
    "enumerate": "load",
    "register": "memory",
    "windows": "windows",
    "connect": "connect",
    "send-receive": "messages",
    "read-write": "one_sided",
    "ordering": "ordering",
    "notification": "notification",
    "disconnect": "disconnect",
    "refusals": "refusals",
    "performance": "performance",
}

#: A check returns what it saw, for the report; it raises Failure, or whatever the library raised.
Body = Callable[["Lab"], str]


class Verdict(enum.Enum):
    PASS = "PASS"
    FAIL = "FAIL"
    KNOWN = "KNOWN"
    SKIP = "SKIP"


class Failure(Exception):
    """The adapter did something else than what the check claims."""


class Skip(Exception):
    """The adapter does not claim what the check needs."""


@dataclass(frozen=True)
class Check:
    """A named claim. needs: the capabilities (AdapterInfo.capabilities) without which it is skipped."""

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
    """How a check went."""

    check: Check
    verdict: Verdict
    reason: str
    seconds: float = 0.0
    reference: str = ""
    figures: dict[str, float] = field(default_factory=dict)


_registered: list[Check] = []


def check(group: str, name: str, *, needs: tuple[Capability, ...] = ()) -> Callable[[Body], Body]:
    """Make a function a check; its docstring is the claim."""
    assert group in GROUPS, group

    def register(body: Body) -> Body:
        claim = " ".join((inspect.getdoc(body) or "").split()).rstrip(".")
        assert claim, f"{group}/{name} claims nothing"
        _registered.append(Check(group, name, claim, needs, body))
        return body

    return register


def load(groups: Iterable[str] = ()) -> list[Check]:
    """The checks of these groups (of all without one), in the order of running."""
    for module in dict.fromkeys(GROUPS.values()):
        importlib.import_module(f"ndpy.cli.smoke.checks.{module}")
    wanted = set(groups) or set(GROUPS)
    order = list(GROUPS)
    return sorted((c for c in _registered if c.group in wanted), key=lambda c: order.index(c.group))
