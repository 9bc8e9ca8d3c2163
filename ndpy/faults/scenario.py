"""Scenarios: what goes wrong with an adapter, and when."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ndpy.errors import NdpyError
from ndpy.faults import kinds
from ndpy.faults.kinds import MOST, Data, Kind, Number, Word, one_of

_OCCASIONS = ("nth", "every", "probability")
# The places whose faults can be limited to an operation, a size or some content.
_WITH_CONTENT = ("request", "message")


class ScenarioError(NdpyError, ValueError):
    """A scenario that cannot be. The text says where, what, and what is possible.

    Attributes:
        word: the word of the fault that is wrong, or "".
    """

    problem = "scenario"

    def __init__(self, text: str, word: str = "") -> None:
        super().__init__(text)
        self.word = word


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong: `Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")`.

    docs/faults.md and `ndpy faults list` have the table of kinds, with the values of each.

    Parameters:
        do: the kind, such as "errno", "status" or "delay".
        at: "call", "request", "message", "connection" or "adapter". Only "delay" needs it, which can be at two.
        call: for calls, which: the function's name without `ibv_`, but with `rdma_`. Default: all.
        operation: for requests and messages, which: "send", "write", "receive" … Default: all.
        queue_pair: only this one. They are counted in the order in which the process creates them, from 1.
        peer: only connections with this IP address.
        min_size, max_size: only requests and messages of at least, and at most, this many bytes.
        content: only requests and messages whose data begins with these bytes, at most 64.
        nth: at this one, counted from 1, of those that the words above choose. Requests, messages, and calls of a queue
            pair are counted for each queue pair. Connections and other calls are counted for the process.
        every: at each one whose number is a multiple of this.
        probability: at some, from 0 to 1. The scenario's seed decides at which.
        after_ms, until_ms: only in this time, since the program has opened its first adapter.
        times: at most this often; with nth, from that one on. Default: once with nth and for the adapter, else without
            end.
        errno, status, ms, limit, bytes, data: values of the kind.
    Raises:
        ScenarioError: a word that this kind does not have, that is missing, or that is out of its bounds.
    """

    do: str = dataclasses.field(kw_only=False)
    at: str = ""
    call: str | None = None
    operation: str | None = None
    queue_pair: int | None = None
    peer: str | None = None
    min_size: int | None = None
    max_size: int | None = None
    content: builtins.bytes | None = None
    nth: int | None = None
    every: int | None = None
    probability: float | None = None
    after_ms: int | None = None
    until_ms: int | None = None
    times: int | None = None
    errno: str | None = None
    status: str | None = None
    ms: int | None = None
    limit: int | None = None
    bytes: int | None = None
    data: builtins.bytes | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", _place_of(self))
        _check_which(self)
        _check_when(self)
        _check_values(self)

    @property
    def kind(self) -> Kind:
        """The row of the table of kinds. For the implementation."""
        return next(kind for kind in kinds.kinds_named(self.do) if kind.at == self.at)

    def why_not(self, executor: str) -> str:
        """Why an executor cannot make it. "" if it can.

        Parameters:
            executor: "engine", "shim" or "softnd".
        """
        return kinds.why_not(executor, self.kind, self.call, self.status, self.errno)

    def words(self) -> list[tuple[str, str]]:
        """(name, value) of each field that is given, as in the plain form. For the implementation."""
        given = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(name, _plain(value)) for name, value in given if value is not None]

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.words())


def _plain(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    return f"{value:.15f}" if isinstance(value, float) else str(value)


# ---- what a fault may say ----


def _place_of(fault: Fault) -> str:
    do = _text(fault, "do")
    found = [kind.at for kind in kinds.kinds_named(do)]
    if not found:
        names = dict.fromkeys(kind.do for kind in kinds.KINDS)
        raise ScenarioError(f"{do!r} is not a kind of fault; the kinds are {', '.join(names)}", "do")
    if not fault.at:
        if len(found) > 1:
            raise ScenarioError(f"{do} can be at {one_of(f'a {at}' for at in found)}; say which with at", "do")
        return found[0]
    if fault.at not in kinds.PLACES:
        raise ScenarioError(f"at is {fault.at!r}; it can be {one_of(kinds.PLACES)}", "at")
    if fault.at not in found:
        raise ScenarioError(f"{do} is not for at = {fault.at!r}; it is for {one_of(map(repr, found))}", "at")
    return fault.at


def _check_which(fault: Fault) -> None:
    if fault.call is not None:
        _check_call(fault, _text(fault, "call"))
    elif fault.do == "limit":
        raise ScenarioError("limit needs call, the name of a function", "call")
    if fault.at not in _WITH_CONTENT:
        _refuse(fault, "operation", "min_size", "max_size", "content")
    if fault.at in ("call", "adapter"):
        _refuse(fault, "peer")
    if fault.operation is not None and _text(fault, "operation") not in kinds.OPERATIONS:
        raise ScenarioError(
            f"{fault.operation!r} is not an operation; the operations are {', '.join(kinds.OPERATIONS)}", "operation"
        )
    if fault.do == "late_receive" and fault.operation != "receive":
        raise ScenarioError("late_receive needs operation = 'receive'", "operation")
    for name, least in (("queue_pair", 1), ("min_size", 0), ("max_size", 0)):
        _number(fault, name, least, 2**32 - 1)
    if fault.min_size is not None and fault.max_size is not None and fault.min_size > fault.max_size:
        raise ScenarioError(f"no size is from min_size = {fault.min_size} to max_size = {fault.max_size}", "max_size")
    _bytes(fault, "content", 64)
    if fault.peer is not None:
        try:
            ipaddress.ip_address(_text(fault, "peer"))
        except ValueError:
            raise ScenarioError(f"peer is {fault.peer!r}, which is not an IP address", "peer") from None


def _check_call(fault: Fault, name: str) -> None:
    if fault.at != "call":
        _refuse(fault, "call")
    call = kinds.call_named(name)
    if call is None:
        names = ", ".join(each.name for each in kinds.CALLS)
        raise ScenarioError(f"no faults are known of a call {name!r}; there are {names}", "call")
    if fault.do == "limit" and not call.limited:
        names = one_of(each.name for each in kinds.CALLS if each.limited)
        raise ScenarioError(f"{name} makes no objects whose number can be limited; use {names}", "call")
    if fault.queue_pair is not None and not call.of_queue_pair:
        raise ScenarioError(f"{name} has no queue pair", "queue_pair")


def _check_when(fault: Fault) -> None:
    given = [name for name in _OCCASIONS if getattr(fault, name) is not None]
    if len(given) > 1:
        raise ScenarioError(f"{' and '.join(given)} exclude each other", given[1])
    if given and fault.do == "limit":
        raise ScenarioError("a limit holds always; it takes no " + given[0], given[0])
    for name in ("nth", "every"):
        _number(fault, name, 1, MOST)
    _number(fault, "after_ms", 0, kinds.DAY_MS)
    _number(fault, "until_ms", 1, kinds.DAY_MS)
    _number(fault, "times", 1, MOST)
    if fault.after_ms is not None and fault.until_ms is not None and fault.after_ms >= fault.until_ms:
        raise ScenarioError(f"after_ms = {fault.after_ms} is not before until_ms = {fault.until_ms}", "until_ms")
    probability = fault.probability
    if probability is not None:
        if isinstance(probability, bool) or not isinstance(probability, (int, float)) or not 1e-12 <= probability <= 1:
            raise ScenarioError(f"probability is {probability!r}; it has to be from 1e-12 to 1", "probability")
        object.__setattr__(fault, "probability", float(probability))


def _check_values(fault: Fault) -> None:
    kind = fault.kind
    for value in kinds.VALUES:
        given = getattr(fault, value.name)
        if given is None:
            if value.name in kind.values:
                raise ScenarioError(f"{kind.do} needs {value.name}: {value.meaning}", value.name)
            continue
        if value.name not in (*kind.values, *kind.optional):
            takes = ", ".join((*kind.values, *kind.optional)) or "no value"
            raise ScenarioError(f"{kind.do} has no {value.name}; it takes {takes}", value.name)
        if isinstance(value, Number):
            _number(fault, value.name, value.minimum, value.maximum)
        elif isinstance(value, Data):
            _bytes(fault, value.name, value.maximum)
        elif _text(fault, value.name) not in value.words:
            _refuse_word(value, given)
    if fault.status is not None and fault.status not in kinds.statuses_of(fault.operation):
        possible = ", ".join(kinds.statuses_of(fault.operation))
        raise ScenarioError(f"{fault.operation} never ends with {fault.status}; it can with {possible}", "status")


def _refuse_word(value: Word, given: str) -> None:
    raise ScenarioError(f"{value.name} is {given!r}; it can be {one_of(value.words)}", value.name)


def _refuse(fault: Fault, *names: str) -> None:
    for name in names:
        if getattr(fault, name) is not None:
            raise ScenarioError(f"{name} has no meaning where at is {fault.at!r}", name)


def _text(fault: Fault, name: str) -> str:
    value = getattr(fault, name)
    if not isinstance(value, str):
        raise ScenarioError(f"{name} is {value!r}, and not a text", name)
    return value


def _number(fault: Fault, name: str, minimum: int, maximum: int) -> None:
    value = getattr(fault, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
        raise ScenarioError(f"{name} is {value!r}; it has to be a whole number from {minimum} to {maximum}", name)


def _bytes(fault: Fault, name: str, maximum: int) -> None:
    value = getattr(fault, name)
    if value is None:
        return
    if not isinstance(value, bytes):
        raise ScenarioError(f"{name} is {value!r}, and not bytes", name)
    if not 1 <= len(value) <= maximum:
        raise ScenarioError(f"{name} has {len(value)} bytes; it can have 1 to {maximum}", name)


# ---- scenarios ----


@dataclass(frozen=True)
class Scenario:
    """What goes wrong, and when.

    Parameters:
        faults: any number. Where several could happen, the first does.
        seed: 0 to 2**64 - 1, for faults with a probability. The same seed gives each queue pair the same faults.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    def __init__(self, faults: Iterable[Fault] = (), seed: int = 0) -> None:
        listed = tuple(faults)
        for fault in listed:
            if not isinstance(fault, Fault):
                raise ScenarioError(f"a scenario has objects of Fault, not {fault!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ScenarioError(f"seed is {seed!r}; it has to be a whole number from 0 to {2**64 - 1}", "seed")
        object.__setattr__(self, "faults", listed)
        object.__setattr__(self, "seed", seed)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Scenario:
        """Read a TOML file. Needs Python 3.11, or the package tomli.

        Parameters:
            path: of the file.

        Raises:
            ScenarioError: the file is not a scenario. The text has its name and the line.
            OSError: it cannot be read.
        """
        name = os.fspath(path)
        try:
            return cls.parse(Path(name).read_text("utf-8"))
        except UnicodeDecodeError as error:
            raise ScenarioError(f"{name}: not UTF-8: {error}") from None
        except ScenarioError as error:
            raise ScenarioError(f"{name}: {error}", error.word) from None

    @classmethod
    def parse(cls, text: str) -> Scenario:
        """Read the text of a TOML file, as load() does.

        Parameters:
            text: the content of the file.
        Raises:
            ScenarioError: it is not TOML, or not a scenario. The text says where and what is possible.
        """
        toml = _toml()
        try:
            read = toml.loads(text)
        except toml.TOMLDecodeError as error:
            raise ScenarioError(f"no TOML: {error}") from None
        unknown = read.keys() - {"seed", "fault"}
        if unknown:
            raise ScenarioError(f"{min(unknown)!r} is unknown; a scenario has seed and [[fault]]")
        tables = read.get("fault", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise ScenarioError("faults are written as [[fault]], with two brackets")
        made = []
        for number, table in enumerate(tables):
            try:
                made.append(_fault_of(table))
            except ScenarioError as error:
                line = _line_of(text, number, error.word)
                place = f"line {line}" if line else f"fault {number + 1}"
                raise ScenarioError(f"{place}: {error}", error.word) from None
        return cls(made, read.get("seed", 0))

    def check_for(self, executor: str) -> None:
        """Refuse a scenario that an executor cannot make.

        Parameters:
            executor: "engine", "shim" or "softnd".
        Raises:
            ScenarioError: it cannot make one of the faults. The text says why.
        """
        for number, fault in enumerate(self.faults, 1):
            reasons = {name: fault.why_not(name) for name in kinds.EXECUTORS}
            if reasons[executor]:
                able = [name for name, reason in reasons.items() if not reason]
                others = f"; {one_of(able)} can" if able else ""
                raise ScenarioError(
                    f"fault {number}: {executor} cannot make it, because {reasons[executor]}{others}: {fault}", "do"
                )

    def plain(self, executor: str, report: Path | None = None, count: Path | None = None) -> str:
        """The text that the executors in C read. For the implementation.

        Parameters:
            executor: "engine", "shim" or "softnd".
            report: the file to which they write what fired. None for no file.
            count: the file to which they write what they counted. None for no file.
        Raises: what check_for() raises.
        """
        self.check_for(executor)
        lines = ["scenario 1", f"seed {self.seed}"]
        lines += [f"{word} {path}" for word, path in (("report", report), ("count", count)) if path is not None]
        return "\n".join([*lines, *(f"fault {fault}" for fault in self.faults)]) + "\n"


_NAMES = {field.name for field in dataclasses.fields(Fault)}


def _fault_of(table: Mapping[str, Any]) -> Fault:
    unknown = sorted(table.keys() - _NAMES)
    if unknown:
        raise ScenarioError(f"a fault has no {unknown[0]!r}; it has {', '.join(sorted(_NAMES))}", unknown[0])
    values = dict(table)
    if "do" not in values:
        raise ScenarioError("do is missing: the kind of fault")
    for name in ("content", "data"):
        if name in values:
            values[name] = _hex(name, values[name])
    return Fault(values.pop("do"), **values)


def _hex(name: str, value: object) -> bytes:
    try:
        return bytes.fromhex(value) if isinstance(value, str) else _not_hex(name, value)
    except ValueError:
        return _not_hex(name, value)


def _not_hex(name: str, value: object) -> bytes:
    raise ScenarioError(f"{name} is {value!r}; it is written in hexadecimal digits", name) from None


def _line_of(text: str, number: int, word: str) -> int:
    """The line of a word in the file's fault of this number, from 0. The line of the fault if the word is not there. 0
    if faults are not written as blocks.
    """
    lines = text.splitlines()
    heads = [index for index, line in enumerate(lines) if re.match(r"\s*\[\[\s*fault\s*\]\]", line)]
    if number >= len(heads):
        return 0
    end = heads[number + 1] if number + 1 < len(heads) else len(lines)
    for index in range(heads[number] + 1, end):
        if word and re.match(rf"\s*{re.escape(word)}\s*=", lines[index]):
            return index + 1
    return heads[number] + 1


def _toml() -> Any:
    try:
        return importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    except ImportError:
        raise ScenarioError(
            "to read TOML, this Python needs the package tomli: pip install 'ndpy[faults]'; Python 3.11 and later "
            "do not"
        ) from None
