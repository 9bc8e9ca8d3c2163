"""A fault of each kind, for tests that compare an executor with the table of kinds."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator

from ndpy.faults import Fault, kinds
from ndpy.faults.kinds import Data, Number


def every_fault() -> Iterator[Fault]:
    """A fault of each kind, at each call, and with each status."""
    for kind in kinds.KINDS:
        given: dict[str, object] = {"at": kind.at, "nth": 1000}
        for name in kind.values:
            value = kinds.value_named(name)
            given[name] = 1 if isinstance(value, Number) else b"x" if isinstance(value, Data) else value.words[0]
        if kind.do == "limit":
            del given["nth"]
        if kind.do == "late_receive":
            given["operation"] = "receive"
        if kind.do == "status":
            yield from (Fault("status", **(given | {"status": status.name})) for status in kinds.STATUSES)
        elif kind.at == "call":
            calls = [call for call in kinds.CALLS if kind.do != "limit" or call.limited]
            yield from (Fault(kind.do, **(given | {"call": call.name})) for call in calls)
        else:
            yield Fault(kind.do, **given)


def limits(without: Collection[str]) -> Iterator[tuple[Fault, str]]:
    """For each call that makes objects, so few of these that each_call.c has one too many, and what it prints then.

    without: names of calls that are left out.
    """
    # It has made two queue pairs by ibv_create_qp(3) before, and a client's request has an identifier, too.
    later = {"rdma_create_qp": (2, 1), "rdma_create_id": (3, 3)}
    for call in kinds.CALLS:
        if call.limited and call.name not in without:
            limit, count = later.get(call.name, (1, 2))
            yield Fault("limit", call=call.name, limit=limit), f"{call.name} {count} {errno.ENOMEM}"
