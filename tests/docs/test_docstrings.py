"""Each public name says what it is, takes, raises and comes from. These are the rules:

- **Docstring.** Each class, function, method, property, attribute and member of an enumeration has a text: a docstring,
  or a line in a list of its class. Methods between underscores have none.
- **Parameters.** Each parameter of a function or method, and of a constructor that users call, has a line in the list.
- **Raises.** What the body of a function or property raises, its docstring names. Each call that waits (`timeout_s`)
  raises something, and so does each compiled method with parameters.
- **Source.** Each class whose objects stand for an object of the provider has one, and each method that calls the
  provider (`_native_…`) has one itself or in its class.

A docstring that points to another name, as "See write()" and "Start connect()" do, may leave to it what it says.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import docstrings
import public
import public_names
import pytest

import ndpy
import ndpy.tools.cli
from ndpy.objects.resource import Resource

POINTS = re.compile(r"\b(?:[Ss]ee|Start|Do what|[Aa]s|as for|what) (?:for )?[\w.]*\w+\(\)")
PYTHONS_OWN = ("TypeError", "AssertionError", "AttributeError", "StopIteration", "StopAsyncIteration", "KeyError")


def callables() -> Iterator[tuple[str, list[str], str]]:
    """The whole name, the lines and the docstring of each function and method."""
    for name in public.all_names():
        thing = public.find(name)
        if isinstance(thing, type):
            for member, lines in public.members(thing).items():
                if lines[0].startswith(f".{member}("):
                    yield f"{name}.{member}", lines, public.text_of(thing, member)
                elif member == "__init__":
                    yield name, lines, thing.__doc__ or ""
        elif callable(thing):
            yield name, [_line(name)], thing.__doc__ or ""


def _line(name: str) -> str:
    module = __import__(name.rpartition(".")[0], fromlist=["x"])
    return next(line for line in public_names._of_module(module) if line.startswith(f"{name}("))


def parameters(line: str) -> list[str]:
    """The names of the parameters in a line of public_names."""
    inside = re.sub(r"( -> .*)?( \[\w+\])*$", "", line[line.index("(") :])
    tree = ast.parse(f"def f{inside}: pass")
    arguments = tree.body[0].args  # type: ignore[attr-defined]
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [each.arg for each in every if each is not None]


def test_each_public_name_has_a_docstring() -> None:
    missing = []
    for name in public.all_names():
        thing = public.find(name)
        if isinstance(thing, type):
            if name not in public.VALUES and not (thing.__doc__ and thing.__module__.startswith("ndpy")):
                missing.append(name)
            for member in public.members(thing):
                if not member.startswith("__") and not public.text_of(thing, member):
                    missing.append(f"{name}.{member}")
        elif (callable(thing) and not thing.__doc__) or (not callable(thing) and name not in public.VALUES):
            missing.append(name)
    assert missing == [], "\n".join(missing)


def test_each_parameter_has_a_sentence() -> None:
    missing = []
    for name, lines, text in callables():
        said = docstrings.read(text)
        known = said.entries("Parameters")
        if POINTS.search(said.summary) or any(POINTS.search(block) for block in said.body):
            continue
        missing += [f"{name}: {each}" for each in parameters(lines[0]) if each not in known]
    assert missing == [], "\n".join(missing)


@cache
def tree_of(module: str) -> ast.Module:
    return public_names._source(module)


def raised(cls_or_function: Any, member: str | None) -> set[str]:
    """The names of the exceptions that a function's body raises by itself."""
    owner = cls_or_function
    if member is not None:
        owner = next((each for each in owner.__mro__ if member in vars(each)), None)
        if owner is None or owner.__module__.partition(".")[0] != "ndpy":
            return set()
    tree = tree_of(owner.__module__)
    nodes: list[Any] = [tree]
    if member is not None:
        nodes = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == owner.__name__]
    wanted = member or owner.__name__
    found = set()
    for node in nodes:
        for each in node.body:
            if isinstance(each, public_names.Function) and each.name == wanted:
                for part in ast.walk(each):
                    if isinstance(part, ast.Raise) and isinstance(part.exc, ast.Call):
                        found.add(ast.unparse(part.exc.func).rpartition(".")[2])
    return {each for each in found if each.endswith("Error") and each not in PYTHONS_OWN}


def members_that_run() -> Iterator[tuple[str, Any, str | None, list[str], str]]:
    for name in public.all_names():
        thing = public.find(name)
        if isinstance(thing, type):
            for member, lines in public.members(thing).items():
                if not member.startswith("__"):
                    yield f"{name}.{member}", thing, member, lines, public.text_of(thing, member)
        elif inspect.isfunction(thing):
            yield name, thing, None, [_line(name)], thing.__doc__ or ""


def test_what_a_body_raises_its_docstring_names() -> None:
    missing = []
    for name, thing, member, lines, text in members_that_run():
        said = docstrings.read(text)
        raises = said.section("Raises")
        known = said.entries("Raises")
        points = bool(POINTS.search(text))
        for error in raised(thing, member):
            if error not in known and error not in (raises.text if raises else "") and not points:
                missing.append(f"{name}: {error}")
        waits = "timeout_s" in lines[0] and not lines[0].endswith("Error")
        compiled = member is not None and not inspect.isfunction(inspect.getattr_static(thing, member, None))
        takes = lines[0].startswith(f".{member}(") and not lines[0].startswith(f".{member}()")
        if (waits or (compiled and takes and not is_enum_or_python(thing, member))) and not raises and not points:
            missing.append(f"{name}: no Raises")
    assert missing == [], "\n".join(missing)


def is_enum_or_python(thing: Any, member: str) -> bool:
    found = inspect.getattr_static(thing, member, None)
    return isinstance(found, (classmethod, staticmethod))


def calls_the_provider(thing: type, member: str) -> bool:
    owner = next((each for each in thing.__mro__ if member in vars(each)), None)
    if owner is None or not inspect.isfunction(vars(owner)[member]):
        return False
    tree = tree_of(owner.__module__)
    (cls,) = [each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == owner.__name__]
    return any(
        re.search(r"self\._native_\w+\(", ast.unparse(each))
        for each in cls.body
        if isinstance(each, public_names.Function) and each.name == member
    )


def test_what_stands_for_a_call_of_the_provider_names_it() -> None:
    missing = []
    for name in public.all_names():
        thing = public.find(name)
        if not isinstance(thing, type):
            continue
        said = docstrings.read(thing.__doc__)
        if issubclass(thing, Resource) and said.section("Source") is None:
            missing.append(name)
        for member in public.members(thing):
            if not calls_the_provider(thing, member):
                continue
            own = docstrings.read(public.text_of(thing, member))
            if own.section("Source") is None and said.section("Source") is None:
                missing.append(f"{name}.{member}")
    assert missing == [], "\n".join(missing)


@pytest.mark.parametrize("name", sorted(ndpy.tools.cli._SUBCOMMANDS))
def test_each_option_of_a_command_has_a_sentence(name: str) -> None:
    import click

    def walk(command: click.Command, whole: str) -> Iterator[str]:
        if not command.help:
            yield whole
        for option in command.params:
            if isinstance(option, click.Option) and not (option.help or "").strip():
                yield f"{whole} {option.opts[-1]}"
        if isinstance(command, click.Group):
            for sub, each in command.commands.items():
                yield from walk(each, f"{whole} {sub}")

    command = ndpy.tools.cli.main.get_command(click.Context(ndpy.tools.cli.main), name)
    assert command is not None
    assert list(walk(command, f"ndpy {name}")) == []
