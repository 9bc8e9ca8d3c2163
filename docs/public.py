"""The directive `public` of Sphinx: the public names of ndpy, with their signatures and docstrings.

    ```{eval-rst}
    .. public:: ndpy.QueuePair ndpy.Flags
    ```

tests/unit/public_names.py says which names are public and what their signatures are, so the site and the list that
tests compare are the same. The docstrings are those of the built ndpy.
"""

from __future__ import annotations

import ast
import builtins
import enum
import importlib
import re
import sys
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.ext.graphviz import graphviz

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests/unit")]

import docstrings  # noqa: E402
import public_names  # noqa: E402

#: Where a list of a class says something of its members.
LISTS = ("Attributes", "Fields", "Names", "Parameters")
#: What has a docstring of its own, if it has one.
DESCRIPTORS = (
    types.FunctionType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    property,
    classmethod,
    staticmethod,
)


def find(name: str) -> Any:
    """The class, function or constant with a public name."""
    module, _, last = name.rpartition(".")
    return getattr(importlib.import_module(module), last)


@cache
def names() -> dict[str, list[str]]:
    """What the reference has: each name of all_names() that is not for the implementation, with such members."""
    found = {}
    for name, own in all_names().items():
        thing = find(name)
        if not isinstance(thing, type):
            if not is_for_implementation(getattr(thing, "__doc__", "")):
                found[name] = own
        else:
            found[name] = [member for member in own if not is_for_implementation(text_of(thing, member))]
    return found


def is_for_implementation(text: str | None) -> bool:
    """Whether a docstring says that users do not call this, although its name is public."""
    return "For the implementation" in " ".join((text or "").split())


@cache
def all_names() -> dict[str, list[str]]:
    """Each public name, other than those of modules that have it from elsewhere, with its members."""
    found: dict[str, list[str]] = {}
    for module in public_names.MODULES:
        for last in public_names.exported(importlib.import_module(module)):
            thing = find(f"{module}.{last}")
            if all(thing is not other for other in map(find, found)):
                found[f"{module}.{last}"] = list(members(thing)) if isinstance(thing, type) else []
    return found


def members(cls: type) -> dict[str, list[str]]:
    """The members of a class that its public base classes lack, with the words after the class's name in its lines. The
    members of an enumeration too.
    """
    bases = [base for base in cls.__mro__[1:] if public_names._is_visible(base)]
    inherited = {name: lines for base in reversed(bases) for name, lines in public_names.members(base).items()}
    own = {name: lines for name, lines in public_names.members(cls).items() if inherited.get(name) != lines}
    if issubclass(cls, enum.Enum):
        own = {name: [f".{name} = {member.value!r}"] for name, member in cls.__members__.items()} | own
    return own


def text_of(cls: type, name: str) -> str:
    """The docstring of a member: its own, or what a list of its class says of it."""
    for each in cls.__mro__:
        thing = vars(each).get(name)
        if isinstance(thing, DESCRIPTORS) or hasattr(thing, "__wrapped__"):
            text = thing.__func__.__doc__ if isinstance(thing, (classmethod, staticmethod)) else thing.__doc__
            if text and not isinstance(thing, types.WrapperDescriptorType):
                return text
    for each in cls.__mro__:
        for entry, text in docstrings.read(vars(each).get("__doc__")).entries(*LISTS).items():
            if entry == name or (entry.endswith("…") and name.startswith(entry[:-1])):
                return text[0].upper() + text[1:]
    return ""


def is_special(name: str) -> bool:
    return name.startswith("__") and name != "__init__"


# ---- marked text ----

_TOKEN = re.compile(
    r"`(?P<literal>[^`]+)`|\x00(?P<name>[^\x00]+)\x00|(?P<man>\b\w+\(\d\w?\))|"
    r"(?P<clause>\bcontract (?:section )?(?P<letter>[A-M])(?:\.\d+)*\b)|"
    r"(?P<word>\b[A-Za-z_]\w*(?:::?\w+|\.[A-Za-z_]\w*)*(?:\(\))?)"
)
_CLAUSES = {path.stem[0].upper(): path.stem for path in (Path(__file__).parent / "contract").glob("?-*.md")}
_PLAIN = re.compile(r"[A-Za-z]+")


def inline(context: str) -> Callable[[str], str]:
    """A function that marks names, links to those that are public, and escapes everything else. context: the public
    name whose text it is.
    """

    def mark(text: str) -> str:
        found = ""
        end = 0
        for token in _TOKEN.finditer(text):
            found += _escaped(text[end : token.start()])
            end = token.end()
            marked = _marked(token, context)
            if marked[0] in "`:" and found and not re.search(r"[\s('\"\[{<\-/:]$", found):
                found += "\\ "
            found += marked
            if marked[-1] == "`" and not re.match(r"[\s'\")\]}>\-/:.,;!?]|$", text[end:]):
                found += "\\ "
        return found + _escaped(text[end:])

    return mark


def _marked(token: re.Match[str], context: str) -> str:
    word = token["word"]
    if token["clause"]:
        return f":doc:`{token['clause']} </contract/{_CLAUSES[token['letter']]}>`"
    if word is None:
        return (
            f"``{token['literal'] or token['name'] or token['man']}``"
            if not token["name"]
            else _name(token["name"], context)
        )
    target = resolve(word.removesuffix("()"), context, is_call=word.endswith("()"))
    if target:
        return f":py:obj:`{word} <{target}>`"
    return _escaped(word) if _PLAIN.fullmatch(word) else f"``{word}``"


def _name(word: str, context: str) -> str:
    """A name at the beginning of a line of a list: a parameter, or an error."""
    target = resolve(word, context, is_call=False) if word.endswith("Error") else None
    return f":py:obj:`{word} <{target}>`" if target else f"``{word}``"


def _escaped(text: str) -> str:
    return re.sub(r"([\\*|_`])", r"\\\1", text)


@cache
def resolve(word: str, context: str, is_call: bool = False) -> str | None:
    """The whole public name that a word stands for, in the docstring of `context`."""
    known = names()
    module = next(each for each in sorted(public_names.MODULES, reverse=True) if context.startswith(each))
    head, _, member = word.rpartition(".")
    if head:
        owner = resolve(head, context) if head[0].isupper() or head in public_names.MODULES else None
        if owner in known:
            return f"{owner}.{member}" if _has(owner, member) else None
        return word if word in known else None
    own = ".".join(context.split(".")[: module.count(".") + 2])
    if own in known and f"{own}.{word}" != context and _has(own, word) and (is_call or word.isupper()):
        return f"{own}.{word}"
    if word[0].isupper() or is_call:
        for candidate in (f"{module}.{word}", f"ndpy.{word}"):
            if candidate in known and candidate != context:
                return candidate
    if is_call or (word.isupper() and "_" in word):
        owners = {_owner_of(name, word) for name, each in known.items() if word in each} - {None}
        if len(owners) == 1:
            return f"{owners.pop()}.{word}"
    return None


def _has(owner: str, member: str) -> bool:
    return _owner_of(owner, member) is not None


def _owner_of(name: str, member: str) -> str | None:
    """The class whose page has a member: the class itself, or the public base class that it has it from."""
    thing = find(name)
    if not isinstance(thing, type):
        return None
    for each in thing.__mro__:
        whole = _public_name(each)
        if whole and member in names()[whole]:
            return whole
    return None


# ---- the directive ----


#: When one of them changes, the pages are read again.
_SOURCES = [*ROOT.glob("ndpy/**/*.py"), ROOT / "ndpy/_core.pyi"]


class Public(Directive):
    required_arguments = 1
    final_argument_whitespace = True
    has_content = False

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for name in self.arguments[0].split():
            if name not in names():
                raise self.error(f"{name} is not a public name")
            lines += of(name)
        return parsed(self, lines)


#: Bases that say nothing about an exception.
_ANY_ERROR = (object, BaseException, Exception)


def of(name: str) -> list[str]:
    """reStructuredText of a public name with all its members."""
    thing = find(name)
    if not isinstance(thing, type):
        return _of_function_or_value(name, thing)
    own = {member: said for member, said in members(thing).items() if member in names()[name]}
    kind = "exception" if issubclass(thing, BaseException) else "class"
    (signature,) = own.get("__init__", [""])
    lines = ["", f".. py:{kind}:: {name}{signature}", ""]
    docstring = docstrings.read(thing.__doc__ if thing.__module__.startswith("ndpy") else VALUES[name])
    found: list[str] = []
    bases = [whole for base in thing.__mro__[1:] if (whole := _public_name(base))]
    if bases:
        also = [base.__name__ for base in thing.__mro__ if base.__module__ == "builtins" and base not in _ANY_ERROR]
        words = f" It is also Python's {', '.join(f'``{base}``' for base in also)}." if also else ""
        found += [f"Base: {inline(name)(bases[0].rpartition('.')[2])}.{words}", ""]
    constructed = "__init__" in own
    # The list of parameters stays where the class is called. Otherwise it tells of attributes.
    left_out = tuple(word for word in LISTS if word != "Parameters" or not constructed)
    found += docstrings.lines_for_sphinx(docstring, inline(name), left_out)
    found += _notes(thing)
    for member, said in own.items():
        if member != "__init__" and not is_special(member):
            found += _of_member(name, thing, member, said)
    return lines + [f"    {line}" if line else "" for line in found]


@cache
def _public_name(cls: type) -> str | None:
    return next((known for known in names() if find(known) is cls), None)


def _notes(cls: type) -> list[str]:
    """What can be done with an object, in addition to naming its attributes."""
    has = set(members(cls))
    said = []
    if "__enter__" in has:
        said.append("It is a context manager.")
    if "__aenter__" in has:
        said.append("It is an asynchronous context manager.")
    return [" ".join(said), ""] if said else []


def _of_function_or_value(name: str, thing: Any) -> list[str]:
    if not callable(thing):
        text = docstrings.lines_for_sphinx(docstrings.read(VALUES[name]), inline(name))
        return ["", f".. py:data:: {name}", f"    :value: {thing!r}", "", *(f"    {line}" for line in text)]
    (line,) = [
        each
        for each in public_names._of_module(importlib.import_module(name.rpartition(".")[0]))
        if each.startswith(f"{name}(")
    ]
    return _of_callable("function", line, thing.__doc__ or "", name)


#: What constants mean. They have no docstrings.
VALUES = {
    "ndpy.Buffer": (
        "The type of the result of alloc(): Python's memoryview. It is writable, and keeps its memory mapped as "
        "long as anything refers to it."
    ),
    "ndpy.MANAGER_QKEY": (
        "The Q_Key of the connection manager, which queue pairs for datagrams have unless they are given "
        "another one.\nSource: RDMA_UDP_QKEY, rdma_create_id(3)."
    ),
}


def _of_member(owner: str, cls: type, member: str, said: list[str]) -> list[str]:
    whole = f"{owner}.{member}"
    text = text_of(cls, member)
    if said[0].startswith(f".{member}("):
        lines = []
        signatures = [f"{owner}{line}" for line in said]
        return lines + _of_callable("method", signatures[0], text, whole, signatures[1:])
    value = re.fullmatch(r"\.\w+ = (.+)", said[0])
    typed = re.fullmatch(r"\.\w+: (.+?)(, can be set)?", said[0])
    lines = ["", f".. py:attribute:: {whole}"]
    if value:
        lines.append(f"    :value: {value[1]}")
    if typed:
        lines.append(f"    :type: {typed[1]}")
    body = docstrings.lines_for_sphinx(docstrings.read(text), inline(whole))
    if typed and typed[2]:
        body += ["It can be set.", ""]
    return [*lines, "", *(f"    {line}" if line else "" for line in body)]


def _of_callable(kind: str, line: str, text: str, whole: str, more: list[str] | None = None) -> list[str]:
    options = {"[async]": "async", "[classmethod]": "classmethod", "[staticmethod]": "staticmethod"}
    plain = [re.sub(r"( \[\w+\])+$", "", each) for each in [line, *(more or [])]]
    lines = ["", f".. py:{kind}:: {plain[0]}"]
    lines += [f"              {each}" for each in plain[1:]]
    lines += [f"    :{option}:" for mark, option in options.items() if mark in line]
    body = docstrings.lines_for_sphinx(docstrings.read(text), inline(whole))
    return [*lines, "", *(f"    {each}" if each else "" for each in body)]


class PublicOf(Directive):
    """Names of a module that the list of public names leaves out: those of ndpy.testing."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        module, *wanted = self.arguments[0].split()
        lines: list[str] = []
        for name in wanted:
            tree = public_names._source(getattr(importlib.import_module(module), name).__module__)
            (node,) = [each for each in tree.body if getattr(each, "name", "") == name]
            thing, whole = getattr(importlib.import_module(module), name), f"{module}.{name}"
            text = docstrings.read(thing.__doc__)
            if isinstance(thing, type):
                lines += ["", f".. py:class:: {whole}", ""]
                found = docstrings.lines_for_sphinx(text, inline("ndpy"))
                for member in (each for each in node.body if isinstance(each, public_names.Function)):
                    if not member.name.startswith("_"):
                        head = public_names._head(tree, member, is_method=True)
                        said = f"{whole}.{member.name}{head}"
                        found += _of_callable("method", said, ast.get_docstring(member, clean=False) or "", "ndpy")
                lines += [f"    {line}" if line else "" for line in found]
            else:
                said = whole + public_names._head(tree, node, is_method=False)
                lines += _of_callable("function", said, thing.__doc__ or "", "ndpy")
        return parsed(self, lines)


class Types(Directive):
    """Names of types that signatures have and that ndpy does not export: each with what it is. It is an enumeration, or
    stands below a comment that begins with `#:`.
    """

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines: list[str] = []
        for whole in self.arguments[0].split():
            module, _, name = whole.rpartition(".")
            value, text = _definition(module, name)
            lines += ["", f".. py:type:: {name}", f"    :canonical: {value}", "", f"    {inline('ndpy')(text)}", ""]
        return parsed(self, lines)


def _definition(module: str, name: str) -> tuple[str, str]:
    """What a name is in its module, and the text about it."""
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, enum.EnumMeta):
        values = ", ".join(repr(member.value) for member in thing)
        return f"Literal[{values}]", " ".join((thing.__doc__ or "").split())
    tree = public_names._source(module)
    values = {
        target.id: node
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    before = Path(str(sys.modules[module].__file__)).read_text("utf-8").splitlines()[: values[name].lineno - 1]
    text: list[str] = []
    while before and before[-1].startswith("#:"):
        text.insert(0, before.pop().removeprefix("#:").strip())
    return ast.unparse(_Plain(values).visit(values[name].value)), " ".join(text)


class _Plain(ast.NodeTransformer):
    """A type as people write it: with its module's own names replaced, and with `|`."""

    def __init__(self, values: dict[str, ast.Assign]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        is_own = node.id.startswith("_") and node.id in self.values
        return self.visit(self.values[node.id].value) if is_own else node

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        is_name = isinstance(node.value, str) and node.value in names_of_classes()
        return ast.Name(node.value) if is_name else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        if ast.unparse(node.value) != "Union":
            return node
        return _any_of(node.slice.elts)

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        return _any_of([node.left, node.right])


def _any_of(types: list[ast.expr]) -> ast.expr:
    """`A | B | C`, without parentheses where one of them is such a type itself."""
    found, *others = [each for one in types for each in _parts(one)]
    for other in others:
        found = ast.BinOp(found, ast.BitOr(), other)
    return found


def _parts(one: ast.expr) -> list[ast.expr]:
    return [*_parts(one.left), *_parts(one.right)] if isinstance(one, ast.BinOp) else [one]


def names_of_classes() -> set[str]:
    return {name.rpartition(".")[2] for name in names()}


class Fixtures(Directive):
    """The fixtures of the plugin of pytest."""

    def run(self) -> list[nodes.Node]:
        tree = ast.parse((ROOT / "pytest_ndpy.py").read_text("utf-8"))
        lines: list[str] = []
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                "pytest.fixture" in ast.unparse(each) for each in node.decorator_list
            ):
                body = docstrings.lines_for_sphinx(
                    docstrings.read(ast.get_docstring(node, clean=False)), inline("ndpy")
                )
                lines += [
                    "",
                    f".. py:data:: {node.name}",
                    "    :noindex:",
                    "",
                    *(f"    {line}" if line else "" for line in body),
                ]
        return parsed(self, lines)


def parsed(directive: Directive, lines: list[str]) -> list[nodes.Node]:
    env = directive.state.document.settings.env
    for file in (__file__, docstrings.__file__, ROOT / "pytest_ndpy.py", *_SOURCES):
        env.note_dependency(str(file))
    node = nodes.Element()
    directive.state.nested_parse(StringList(lines, source="public names"), directive.content_offset, node)
    return list(node.children)


def link_types(app: Sphinx, env: Any, node: addnodes.pending_xref, contnode: nodes.Node) -> nodes.Node | None:
    """A type in a signature is named without its module."""
    if node.get("refdomain") != "py":
        return None
    target = resolve(node["reftarget"].rpartition(".")[2], "ndpy") or resolve(
        node["reftarget"].rpartition(".")[2], "ndpy.aio.X"
    )
    if target is None:
        return None
    domain = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", target, node, contnode)


def unlink_builtins(app: Sphinx, doctree: nodes.document) -> None:
    """`bytes` in a signature is Python's, and not a member of that name."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("refdomain") == "py" and hasattr(builtins, node["reftarget"]):
            node.replace_self(node.children)


def drop_comments(app: Sphinx, doctree: nodes.document) -> None:
    """A comment, such as code that a page does not show, is HTML that readers of the plain form would see."""
    for node in list(doctree.findall(nodes.raw)):
        if node.astext().startswith("<!--"):
            node.parent.remove(node)


def make_plain(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Markdown has no tooltips of `*` and `/` in signatures, and shows the source of a diagram."""
    if app.builder.name != "markdown":
        return
    for node in list(doctree.findall(nodes.abbreviation)):
        node.replace_self(nodes.Text(node.astext()))
    for node in list(doctree.findall(graphviz)):
        node.replace_self(nodes.literal_block(node["code"], node["code"], language="dot"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.add_directive("public-of", PublicOf)
    app.add_directive("types", Types)
    app.add_directive("fixtures", Fixtures)
    app.connect("missing-reference", link_types)
    app.connect("doctree-read", unlink_builtins)
    app.connect("doctree-read", drop_comments)
    app.connect("doctree-resolved", make_plain)
    return {"parallel_read_safe": True}
