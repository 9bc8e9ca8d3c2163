"""Hypothesis strategies for scenarios of faults. Needs the package hypothesis.

    @given(strategies.scenarios(strategies.faults(do=["status", "errno"])))
    def test_it_survives(scenario): ...

What Hypothesis finds, it makes smaller: fewer faults, at earlier places, with shorter delays.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ndpy.faults import Fault, Scenario, kinds
from ndpy.faults.kinds import Data, Kind, Number, Word

# Enough for tests, and no more than they wait for.
_MOST = {"ms": 200, "bytes": 1 << 20, "limit": 64}


def faults(
    do: Sequence[str] = (),
    *,
    executor: str = "engine",
    most: int = 16,
    calls: Sequence[str] = (),
    operations: Sequence[str] = (),
) -> st.SearchStrategy[Fault]:
    """Single faults, each once, at its nth place.

    Parameters:
        do: names of kinds. Default: every kind that the executor can make.
        executor: "engine", "shim" or "softnd".
        most: the greatest nth.
        calls: names of calls at which there are faults. Default: all.
        operations: names of operations. Default: all.
    """
    found = [kind for kind in kinds.kinds_for(executor) if not do or kind.do in do]
    if not found:
        raise ValueError(f"{executor} makes no faults of these kinds: {', '.join(do)}")
    strategy = st.sampled_from(found).flatmap(lambda kind: _of(kind, executor, most, calls, operations))
    return strategy.filter(lambda fault: not fault.why_not(executor))


def scenarios(of: st.SearchStrategy[Fault] | None = None, *, max_faults: int = 3) -> st.SearchStrategy[Scenario]:
    """Scenarios with one fault or several.

    Parameters:
        of: the faults, by default faults().
        max_faults: the most faults of one scenario.
    """
    listed = st.lists(faults() if of is None else of, min_size=1, max_size=max_faults)
    return st.builds(Scenario, listed, st.integers(0, 2**64 - 1))


def _of(
    kind: Kind, executor: str, most: int, calls: Sequence[str], operations: Sequence[str]
) -> st.SearchStrategy[Fault]:
    given: dict[str, st.SearchStrategy[object]] = {"at": st.just(kind.at)}
    if kind.do != "limit":
        given["nth"] = st.integers(1, most)
    if kind.at == "call":
        names = [call.name for call in kinds.CALLS if executor in call.who(kind.do)]
        given["call"] = st.sampled_from([name for name in names if not calls or name in calls] or names)
    if kind.at in ("request", "message") and kind.do != "late_receive":
        given["operation"] = st.sampled_from(list(operations or kinds.OPERATIONS))
    if kind.do == "late_receive":
        given["operation"] = st.just("receive")
    if kind.do == "status":
        pairs = [
            (operation, status)
            for operation in operations or kinds.OPERATIONS
            for status in kinds.statuses_of(operation)
        ]
        return st.builds(
            lambda pair, nth: Fault("status", operation=pair[0], status=pair[1], nth=nth),
            st.sampled_from(pairs),
            st.integers(1, most),
        )
    for name in (*kind.values, *kind.optional):
        given[name] = _value(kinds.value_named(name))
    if executor == "softnd" and kind.do == "errno":
        given["errno"] = st.just(kinds.SOFTND_ERRNO)
    return st.builds(Fault, st.just(kind.do), **given)


def _value(value: Number | Word | Data) -> st.SearchStrategy[object]:
    if isinstance(value, Word):
        return st.sampled_from(value.words)
    if isinstance(value, Data):
        return st.binary(min_size=1, max_size=value.maximum)
    return st.integers(value.minimum, _MOST[value.name])
