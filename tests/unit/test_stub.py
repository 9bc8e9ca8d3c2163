"""ndpy/_core.pyi, which editors read, says what the compiled module says."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing

import pytest
from stub_docs import STUB, differences, documented, public

import ndpy
from ndpy import _core

SOURCE = STUB.read_text(encoding="utf-8")
CALLS = [
    (f"{getattr(thing, '__objclass__', _core).__name__}.{node.name}", node, thing)
    for node, thing in public(ast.parse(SOURCE), _core)
    if isinstance(node, ast.FunctionDef) and callable(thing)
]


def test_it_has_the_docstrings_of_the_compiled_module():
    assert differences(SOURCE, _core) == [], "run tests/stub_docs.py"


def test_writing_it_again_changes_nothing():
    assert documented(SOURCE, _core) == SOURCE


@pytest.mark.parametrize(
    "method",
    [
        ndpy.QueuePair.write,
        ndpy.QueuePair.send,
        ndpy.QueuePair.receive,
        ndpy.QueuePair.read,
        ndpy.QueuePair.post,
        ndpy.CompletionQueue.poll,
        ndpy.CompletionQueue.poll_into,
        ndpy.Adapter.register,
        ndpy.MemoryRegion.close,
        ndpy.RegistrationCache.local,
        ndpy.Batch.write,
    ],
    ids=lambda method: method.__qualname__,
)
def test_hovering_a_method_shows_its_docstring(method):
    owner = method.__objclass__.__name__
    (found,) = [
        node
        for node, thing in public(ast.parse(SOURCE), _core)
        if thing is getattr(getattr(_core, owner), method.__name__) and node.name == method.__name__
    ]
    assert ast.get_docstring(found) == inspect.getdoc(method)


@pytest.mark.parametrize(("node", "thing"), [call[1:] for call in CALLS], ids=[call[0] for call in CALLS])
def test_its_parameters_are_those_of_the_compiled_module(node, thing):
    if not hasattr(thing, "__text_signature__") or thing.__text_signature__ is None:
        # Of a lock or a record, whose users are in the package.
        assert (
            thing.__objclass__ in (_core.Lock, _core.RLock, _core.Records, _core.Entry)
            if hasattr(thing, "__objclass__")
            else node.name == "identity"
        )
        return
    parameters = list(inspect.signature(thing).parameters.values())
    arguments = node.args
    expected = [
        *((argument.arg, "positional-only") for argument in arguments.posonlyargs),
        *((argument.arg, "positional or keyword") for argument in arguments.args),
        *((argument.arg, "keyword-only") for argument in arguments.kwonlyargs),
    ]
    assert [(each.name, each.kind.description) for each in parameters if each.name != "self"] == [
        each for each in expected if each[0] != "self"
    ]
    defaults = [*arguments.defaults, *(default for default in arguments.kw_defaults if default is not None)]
    assert sum(each.default is not each.empty for each in parameters) == len(defaults)


def test_a_stub_that_says_something_else_is_found_and_mended():
    module = types.ModuleType("sample")

    def write(self):
        """Write.

        More.
        """

    module.Queue = type(
        "Queue",
        (),
        {
            "__doc__": "A queue.",
            "write": write,
            "_hidden": lambda self: None,
            "depth": property(lambda self: 1, doc="How deep."),
        },
    )
    stub = (
        "class Queue:\n    width: int\n    def _hidden(self) -> None: ...\n    def write(\n        self,\n    ) -> "
        'None: ...\n    @property\n    def depth(self) -> int:\n        """How wide."""\n'
    )
    assert differences(stub, module)
    mended = documented(stub, module)
    assert differences(mended, module) == []
    assert documented(mended, module) == mended
    assert (
        mended
        == 'class Queue:\n    """A queue."""\n\n    width: int\n    def _hidden(self) -> None: ...\n    def write(\n   '
        '     self,\n    ) -> None:\n        """Write.\n\n        More.\n        """\n    @property\n    def '
        'depth(self) -> int:\n        """How deep."""\n'
    )


# ---- ndpy.aio ----


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads() is of Python 3.11")
def test_what_receive_returns_is_known_from_its_argument():
    returned = [each.__annotations__ for each in typing.get_overloads(ndpy.aio.Connection.receive)]
    assert [(each.get("into"), each["return"]) for each in returned] == [
        ("None", "bytearray"),
        ("Memory | Sequence[Memory]", "int"),
    ]


@pytest.mark.parametrize("kind", [ndpy.aio.Connection, ndpy.aio.Server])
def test_what_looks_public_is_documented(kind):
    attributes = [
        name
        for name, value in vars(kind).items()
        if not name.startswith("_") and not (hasattr(value, "__name__") or isinstance(value, property))
    ]
    methods = [
        name for name, value in vars(kind).items() if not name.startswith("_") and callable(value) and not value.__doc__
    ]
    assert methods == []
    assert [name for name in attributes if f"{name}," not in kind.__doc__ and f"{name}:" not in kind.__doc__] == []


# ---- enumerations ----


@pytest.mark.parametrize(
    ("member", "text"),
    [
        (ndpy.Status.CANCELED, "Status.CANCELED"),
        (ndpy.Operation.RECEIVE, "Operation.RECEIVE"),
        (ndpy.Notify.ANY, "Notify.ANY"),
        (ndpy.EventKind.PORT_DOWN, "EventKind.PORT_DOWN"),
        (ndpy.QueuePairState.RTS, "QueuePairState.RTS"),
        (ndpy.Access.REMOTE_READ, "Access.REMOTE_READ"),
        (ndpy.Flags.INLINE, "Flags.INLINE"),
        (ndpy.FlushKind.GLOBAL, "FlushKind.GLOBAL"),
    ],
)
def test_members_print_as_names_and_are_numbers_all_the_same(member, text):
    printed = (str(member), f"{member}", "%s" % member, f"{member:>24}")  # noqa: UP031
    assert printed == (text, text, text, text.rjust(24))
    number = int(member)
    assert (f"{member:d}", f"{member:#x}", f"{member:03d}") == (f"{number:d}", f"{number:#x}", f"{number:03d}")
    assert member == number and type(member)(number) is member


def test_flags_print_all_their_names():
    assert set(str(ndpy.Flags.INLINE | ndpy.Flags.SOLICITED).removeprefix("Flags.").split("|")) == {
        "INLINE",
        "SOLICITED",
    }


def test_every_enumeration_of_numbers_prints_names():
    import enum

    numbers = [thing for thing in vars(ndpy).values() if isinstance(thing, type) and issubclass(thing, enum.IntEnum)]
    assert len(numbers) >= 4
    for kind in numbers:
        for member in kind:
            assert str(member) == f"{kind.__name__}.{member.name}"
