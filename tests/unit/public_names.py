"""The public names of ndpy and its commands, with their signatures and options, one a line, in
tests/unit/public_names.txt.

.venv/bin/python tests/unit/public_names.py           prints the lines
.venv/bin/python tests/unit/public_names.py --write   writes the file

Which classes a class derives from is asked at run time. Signatures are those of the source, and for ndpy._core those of
its stub, so the lines are the same with every Python and on every system. Where in ndpy a class or method stands makes
no difference to its line.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click

import ndpy
import ndpy.tools.cli

LIST = Path(__file__).with_name("public_names.txt")
MODULES = ["ndpy", "ndpy.aio", "ndpy.doctor", "ndpy.errors", "ndpy.faults", "ndpy.ndk"]
# Users call the constructors of these. Other objects come from a factory, whose line says what it takes.
MADE_BY_USERS = (
    "AddressVector AlternatePath Batch CompletionArray Endpoint Fault Mdl NdkMr Pending Poller ProviderError "
    "QueuePairAttributes RegistrationCache RemoteMemory RetryPolicy Scenario XrcDestination"
)
# What can be done with an object besides naming its attributes, by methods of these names between underscores.
SPECIAL = "enter exit aenter aexit iter next aiter anext await getitem setitem len contains call eq bool or"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def lines() -> list[str]:
    found = [line for name in MODULES for line in _of_module(importlib.import_module(name))]
    return [*found, *_of_command("ndpy", ndpy.tools.cli.main)]


def _of_command(whole: str, command: click.Command) -> Iterator[str]:
    """A command, its options, and its sub-commands."""
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    yield " ".join(["command", whole, *(str(each.name).upper() for each in arguments)])
    for option in sorted(command.params, key=lambda each: each.opts[-1]):
        if isinstance(option, click.Option):
            names = ", ".join([*option.opts, *option.secondary_opts])
            value = "" if option.is_flag or option.count else " VALUE"
            yield f"command {whole} {names}{value}{', repeated' if option.multiple else ''}"
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found
            yield from _of_command(f"{whole} {name}", found)


def _of_module(module: ModuleType) -> Iterator[str]:
    for name in exported(module):
        thing, whole = getattr(module, name), f"{module.__name__}.{name}"
        first = next(each for each in MODULES if getattr(importlib.import_module(each), name, None) is thing)
        if first != module.__name__:
            yield f"{whole} is {first}.{name}"
        elif isinstance(thing, type):
            yield from _of_class(whole, thing)
        elif inspect.isfunction(thing):
            tree = _source(thing.__module__)
            (node,) = [each for each in tree.body if isinstance(each, Function) and each.name == thing.__name__]
            yield f"{whole}{_head(tree, node, is_method=False)}"
        else:
            yield f"{whole} = {thing!r}"


def exported(module: ModuleType) -> list[str]:
    """The names of __all__, and the errors that it leaves out. Without __all__: the classes and functions of the module
    itself.
    """
    listed = getattr(module, "__all__", None)
    own = module.__name__.rpartition(".")[2]
    found = set(listed or ())
    for name, thing in vars(module).items():
        if name.startswith("_") or not (isinstance(thing, type) or inspect.isfunction(thing)):
            continue
        is_own = thing.__module__.startswith("ndpy.") and thing.__module__.rpartition(".")[2] == own
        is_hidden_error = isinstance(thing, type) and issubclass(thing, ndpy.NdpyError) and hasattr(builtins, name)
        if is_hidden_error if listed else is_own:
            found.add(name)
    return sorted(found)


def _of_class(whole: str, cls: type) -> Iterator[str]:
    bases = [base for base in cls.__mro__[1:] if _is_visible(base)]
    yield f"{whole}: a class" + "".join(f", {base.__name__}" for base in bases)
    if issubclass(cls, enum.Enum):
        yield from (f"{whole}.{name} = {member.value!r}" for name, member in cls.__members__.items())
    inherited = {name: found for base in reversed(bases) for name, found in members(base).items()}
    for name, found in sorted(members(cls).items()):
        if inherited.get(name) != found:
            yield from (f"{whole}{rest}" for rest in found)


def _is_visible(cls: type) -> bool:
    """Whether users can name a class: exported, or of the standard library and no version's own."""
    if cls.__module__.startswith("ndpy"):
        modules = [importlib.import_module(each) for each in MODULES]
        return any(cls.__name__ in exported(each) and getattr(each, cls.__name__) is cls for each in modules)
    return cls is not object and cls.__name__ != "ReprEnum" and cls.__module__ not in ("typing", "abc")


@functools.cache
def members(cls: type) -> dict[str, list[str]]:
    """What follows the class's name in the lines of its public members, those of ndpy's base classes included."""
    found: dict[str, list[str]] = {}
    for each in reversed(cls.__mro__):
        if each.__module__.split(".")[0] == "ndpy":
            found |= _own_members(each)
    if issubclass(cls, enum.Enum):
        found = {name: said for name, said in found.items() if name not in cls.__members__}
    if cls.__name__ not in MADE_BY_USERS.split():
        found.pop("__init__", None)
    elif dataclasses.is_dataclass(cls) and "__init__" not in found:
        found["__init__"] = [f"({', '.join(map(_field, dataclasses.fields(cls)))})"]
    return found


def _field(field: dataclasses.Field[Any]) -> str:
    is_required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    return field.name if is_required else f"{field.name}=..."


def _own_members(cls: type) -> dict[str, list[str]]:
    tree = _source(cls.__module__)
    node = next(each for each in ast.walk(tree) if isinstance(each, ast.ClassDef) and each.name == cls.__qualname__)
    found: dict[str, list[str]] = {}
    for part in _statements(node.body):
        if isinstance(part, Function):
            _add_function(found, tree, part)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found[part.target.id] = [f".{part.target.id}: {_words(tree, part.annotation)}"]
        elif isinstance(part, ast.Assign):
            found |= {target.id: [f".{target.id}"] for target in part.targets if isinstance(target, ast.Name)}
    (init,) = [part for part in node.body if isinstance(part, Function) and part.name == "__init__"] or [None]
    for part in ast.walk(init) if init else ():
        for target in getattr(part, "targets", [getattr(part, "target", None)]):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                annotation = getattr(part, "annotation", None)
                said = f": {_words(tree, annotation)}" if annotation else ""
                found.setdefault(target.attr, [f".{target.attr}{said}"])
    return {name: said for name, said in found.items() if name[0] != "_" or _is_special(name) or name == "__init__"}


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.strip("_") in SPECIAL.split()


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for part in body:
        yield part
        if isinstance(part, ast.If):
            yield from _statements([*part.body, *part.orelse])


def _add_function(found: dict[str, list[str]], tree: ast.Module, part: Function) -> None:
    decorators = [ast.unparse(each).rpartition(".")[2] for each in part.decorator_list]
    if "setter" in decorators:
        found[part.name][0] += ", can be set"
    elif any("property" in each for each in decorators):
        found[part.name] = [f".{part.name}: {_words(tree, part.returns)}"]
    elif part.name == "__init__":
        found[part.name] = [_head(tree, part, is_method=True).removesuffix(" -> None")]
    elif _is_special(part.name):
        found[part.name] = [f".{part.name}"]
    else:
        kind = "".join(f" [{each}]" for each in decorators if each in ("classmethod", "staticmethod", "overload"))
        said = f".{part.name}{_head(tree, part, is_method='staticmethod' not in decorators)}{kind}"
        # Behind its overloads, the function itself is nobody's business.
        if not found.get(part.name, [""])[0].endswith("[overload]"):
            found[part.name] = [said]
        elif "overload" in decorators:
            found[part.name].append(said)


def _head(tree: ast.Module, node: Function, *, is_method: bool) -> str:
    """The parameters and the result of a function, the class's or object's own parameter left out."""
    arguments = node.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    words = [_parameter(tree, *pair) for pair in zip(plain, defaults, strict=True)]
    if arguments.posonlyargs:
        words.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        words.append("*" + _parameter(tree, arguments.vararg, None))
    elif arguments.kwonlyargs:
        words.append("*")
    words += [_parameter(tree, *pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        words.append("**" + _parameter(tree, arguments.kwarg, None))
    if is_method:
        del words[: 2 if words[1:2] == ["/"] else 1]
    result = f" -> {_words(tree, node.returns)}" if node.returns else ""
    return f"({', '.join(words)}){result}{' [async]' if isinstance(node, ast.AsyncFunctionDef) else ''}"


def _parameter(tree: ast.Module, argument: ast.arg, default: ast.expr | None) -> str:
    annotation = f": {_words(tree, argument.annotation)}" if argument.annotation else ""
    if default is None:
        return argument.arg + annotation
    return f"{argument.arg}{annotation}{' = ' if annotation else '='}{_words(tree, default)}"


def _words(tree: ast.Module, node: ast.expr | None) -> str:
    """An expression with each name as its own module has it, and without modules before names."""
    return ast.unparse(_Renaming(_aliases(tree)).visit(ast.parse(ast.unparse(node), mode="eval"))) if node else "?"


class _Renaming(ast.NodeTransformer):
    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Name(self.aliases.get(node.id, node.id), node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        is_of_a_module = isinstance(node.value, ast.Name) and node.value.id.islower()
        return ast.Name(node.attr, node.ctx) if is_of_a_module else self.generic_visit(node)


@functools.cache
def _source(module: str) -> ast.Module:
    file = Path(str(sys.modules[module].__file__))
    if file.suffix != ".py":
        file = Path(str(ndpy.__file__)).with_name(f"{module.rpartition('.')[2]}.pyi")
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def _aliases(tree: ast.Module) -> dict[str, str]:
    """What names of imports are called where they come from."""
    found = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname: alias.name for alias in found if alias.asname}


if __name__ == "__main__":
    text = "".join(f"{line}\n" for line in lines())
    if sys.argv[1:] == ["--write"]:
        LIST.write_text(text, encoding="utf-8", newline="\n")
    else:
        print(text, end="")
