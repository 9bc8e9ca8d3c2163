"""Checks documents against a JSON Schema.
It knows the keywords that schema.json uses, and refuses a schema with others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

#: A place within the value, such as ".node" or "[3]", and what is wrong there.
_Problem = tuple[str, str]
#: A report of thousands of nodes has a million values, so a check of a good one returns this and makes nothing.
_NOTHING: Sequence[_Problem] = ()
#: A check says what is wrong with a value.
_Check = Callable[[Any], Sequence[_Problem]]

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    # 1e999 is infinite in Python.
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    # 1.0 is an integer in JSON Schema.
    "integer": lambda value: type(value) is int or (_TYPES["number"](value) and value == value // 1),
    "null": lambda value: value is None,
}
# Those that say nothing about a value.
_TEXTS = {"$schema", "title", "description"}
_SHOWN = 60
#: With so many problems in it, the rest of a list is not looked at.
_ENOUGH = 100


def problems(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    """A sentence for each thing that is wrong, with its place such as `machines[3].node`. A list in which much is wrong
    is not looked at to its end.

    Raises:
        NotImplementedError: the schema has a keyword that this module does not know.
    """
    for place, text in _checker(schema)(value):
        yield f"{place.removeprefix('.') or 'the document'}: {text}"


def _checker(schema: dict[str, Any]) -> _Check:
    """A check of everything that a schema says."""
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    types, checks = [_TYPES[name] for name in names], []
    for keyword, bound in schema.items():
        if keyword in _KEYWORDS:
            checks.append(_KEYWORDS[keyword](bound, schema))
        elif keyword not in _TEXTS and keyword != "type":
            raise NotImplementedError(f"the keyword {keyword} of a schema")

    def check(value: Any) -> Sequence[_Problem]:
        for is_of_type in types:
            if is_of_type(value):
                break
        else:
            if types:
                return [("", f"{_show(value)} is not {_list(names)}")]
        found = _NOTHING
        for each in checks:
            wrong = each(value)
            if wrong:
                found = [*found, *wrong]
        return found

    return check


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _list(names: list[Any]) -> str:
    return " or ".join(str(name) for name in names)


def _inside(place: str, wrong: Sequence[_Problem]) -> list[_Problem]:
    return [(place + further, text) for further, text in wrong]


# ---- keywords: a check of each, from what it is bound to and its schema ----


def _simple(holds: Callable[[Any, Any], bool], text: Callable[[Any, Any], str]) -> Callable[[Any, Any], _Check]:
    """A keyword that looks at one value, and what it says of one that is wrong."""

    def make(bound: Any, _: dict[str, Any]) -> _Check:
        return lambda value: _NOTHING if holds(value, bound) else [("", text(value, bound))]

    return make


def _const(bound: Any, schema: dict[str, Any]) -> _Check:
    return _enum([bound], schema)


def _enum(bound: list[Any], _: dict[str, Any]) -> _Check:
    def check(value: Any) -> Sequence[_Problem]:
        for each in bound:
            # 1 == True in Python, and not in JSON.
            if value == each and isinstance(value, bool) == isinstance(each, bool):
                return _NOTHING
        return [("", f"{_show(value)} is not {_list([repr(each) for each in bound])}")]

    return check


def _required(bound: list[str], _: dict[str, Any]) -> _Check:
    def check(value: Any) -> Sequence[_Problem]:
        missing = [name for name in bound if name not in value] if isinstance(value, dict) else ()
        return [("", f"there is no field {name}") for name in missing]

    return check


def _properties(bound: dict[str, Any], _: dict[str, Any]) -> _Check:
    checks = {name: _checker(schema) for name, schema in bound.items()}

    def check(value: Any) -> Sequence[_Problem]:
        found = _NOTHING
        for name, each in checks.items() if isinstance(value, dict) else ():
            wrong = each(value[name]) if name in value else _NOTHING
            if wrong:
                found = [*found, *_inside(f".{name}", wrong)]
        return found

    return check


def _others(bound: dict[str, Any], schema: dict[str, Any]) -> _Check:
    each, known = _checker(bound), schema.get("properties", {}).keys()

    def check(value: Any) -> Sequence[_Problem]:
        found = _NOTHING
        for name in value.keys() - known if isinstance(value, dict) else ():
            wrong = each(value[name])
            if wrong:
                found = [*found, *_inside(f"[{_show(name)}]", wrong)]
        return found

    return check


def _prefix_items(bound: list[dict[str, Any]], _: dict[str, Any]) -> _Check:
    checks = [_checker(schema) for schema in bound]

    def check(value: Any) -> Sequence[_Problem]:
        found = _NOTHING
        for place, (each, element) in enumerate(zip(checks, value, strict=False) if isinstance(value, list) else ()):
            wrong = each(element)
            if wrong:
                found = [*found, *_inside(f"[{place}]", wrong)]
        return found

    return check


def _items(bound: dict[str, Any], schema: dict[str, Any]) -> _Check:
    each, first = _checker(bound), len(schema.get("prefixItems", []))

    def check(value: Any) -> Sequence[_Problem]:
        found = _NOTHING
        for place, element in enumerate(value[first:], first) if isinstance(value, list) else ():
            wrong = each(element)
            if wrong:
                found = [*found, *_inside(f"[{place}]", wrong)]
                if len(found) >= _ENOUGH:
                    break
        return found

    return check


def _is_number(value: Any) -> bool:
    return _TYPES["number"](value)


_KEYWORDS: dict[str, Callable[[Any, dict[str, Any]], _Check]] = {
    "const": _const,
    "enum": _enum,
    "minimum": _simple(
        lambda value, bound: not _is_number(value) or value >= bound,
        lambda value, bound: f"{_show(value)} is less than {bound}",
    ),
    "maximum": _simple(
        lambda value, bound: not _is_number(value) or value <= bound,
        lambda value, bound: f"{_show(value)} is more than {bound}",
    ),
    "pattern": _simple(
        lambda value, bound: not isinstance(value, str) or re.search(bound, value) is not None,
        lambda value, bound: f"{_show(value)} does not have the form {bound}",
    ),
    "minLength": _simple(
        lambda value, bound: not isinstance(value, str) or len(value) >= bound,
        lambda _, bound: "the text is empty" if bound == 1 else f"the text is shorter than {bound}",
    ),
    "minItems": _simple(
        lambda value, bound: not isinstance(value, list) or len(value) >= bound,
        lambda value, bound: f"the list has {len(value)} elements, and needs {bound}",
    ),
    "required": _required,
    "properties": _properties,
    "additionalProperties": _others,
    "prefixItems": _prefix_items,
    "items": _items,
}
