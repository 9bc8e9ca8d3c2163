"""Checks documents against a JSON Schema. It knows the keywords that schema.json uses, and refuses a schema with others."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

_TYPES: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    # 1e999 is infinite in Python.
    "number": lambda value: type(value) is int or (type(value) is float and math.isfinite(value)),
    # 1.0 is an integer in JSON Schema.
    "integer": lambda value: _TYPES["number"](value) and value == value // 1,
    "null": lambda value: value is None,
}
# Those that say nothing about a value.
_TEXTS = {"$schema", "title", "description"}
_SHOWN = 60


def problems(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """A sentence for each thing that is wrong, with its place such as `machines[3].node`.

    Raises:
        NotImplementedError: the schema has a keyword that this module does not know.
    """
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_TYPES[name](value) for name in types):
        yield f"{where or 'the document'}: {_show(value)} is not {_list(types)}"
        return
    for keyword, bound in schema.items():
        if keyword in _KEYWORDS:
            yield from _KEYWORDS[keyword](value, bound, where, schema)
        elif keyword not in _TEXTS and keyword != "type":
            raise NotImplementedError(f"the keyword {keyword} of a schema")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _list(names: list[Any]) -> str:
    return " or ".join(str(name) for name in names)


def _is_number(value: Any) -> bool:
    return _TYPES["number"](value)


def _const(value: Any, bound: Any, where: str, _: Any) -> Iterator[str]:
    yield from _enum(value, [bound], where, _)


def _enum(value: Any, bound: list[Any], where: str, _: Any) -> Iterator[str]:
    # 1 == True in Python, and not in JSON.
    if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in bound):
        yield f"{where}: {_show(value)} is not {_list([repr(each) for each in bound])}"


def _minimum(value: Any, bound: float, where: str, _: Any) -> Iterator[str]:
    if _is_number(value) and value < bound:
        yield f"{where}: {_show(value)} is less than {bound}"


def _maximum(value: Any, bound: float, where: str, _: Any) -> Iterator[str]:
    if _is_number(value) and value > bound:
        yield f"{where}: {_show(value)} is more than {bound}"


def _pattern(value: Any, bound: str, where: str, _: Any) -> Iterator[str]:
    if isinstance(value, str) and not re.search(bound, value):
        yield f"{where}: {_show(value)} does not have the form {bound}"


def _min_length(value: Any, bound: int, where: str, _: Any) -> Iterator[str]:
    if isinstance(value, str) and len(value) < bound:
        yield f"{where}: the text is empty" if bound == 1 else f"{where}: the text is shorter than {bound}"


def _min_items(value: Any, bound: int, where: str, _: Any) -> Iterator[str]:
    if isinstance(value, list) and len(value) < bound:
        yield f"{where}: the list has {len(value)} elements, and needs {bound}"


def _required(value: Any, bound: list[str], where: str, _: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{where or 'the document'}: there is no field {name}" for name in bound if name not in value)


def _properties(value: Any, bound: dict[str, Any], where: str, _: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, schema in bound.items():
            if name in value:
                yield from problems(value[name], schema, f"{where}.{name}" if where else name)


def _others(value: Any, bound: dict[str, Any], where: str, schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, dict):
        for name in value.keys() - schema.get("properties", {}).keys():
            yield from problems(value[name], bound, f"{where}[{_show(name)}]")


def _prefix_items(value: Any, bound: list[dict[str, Any]], where: str, _: Any) -> Iterator[str]:
    if isinstance(value, list):
        for place, (each, schema) in enumerate(zip(value, bound, strict=False)):
            yield from problems(each, schema, f"{where}[{place}]")


def _items(value: Any, bound: dict[str, Any], where: str, schema: dict[str, Any]) -> Iterator[str]:
    if isinstance(value, list):
        first = len(schema.get("prefixItems", []))
        for place, each in enumerate(value[first:], first):
            yield from problems(each, bound, f"{where}[{place}]")


_KEYWORDS: dict[str, Callable[[Any, Any, str, dict[str, Any]], Iterator[str]]] = {
    "const": _const,
    "enum": _enum,
    "minimum": _minimum,
    "maximum": _maximum,
    "pattern": _pattern,
    "minLength": _min_length,
    "minItems": _min_items,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _others,
    "prefixItems": _prefix_items,
    "items": _items,
}
