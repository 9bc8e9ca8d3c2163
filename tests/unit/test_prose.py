"""rig/prose.py and its list: each sign is found in a bad sentence, and in no good one."""

import importlib.util
import re
from pathlib import Path

import pytest
from kit.rig import RIG

_spec = importlib.util.spec_from_file_location("prose", RIG / "prose.py")
assert _spec is not None and _spec.loader is not None
prose = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(prose)

BAD = (
    "Refuses what is none.",
    "One that nobody could notice is none.",
    "Texts become None, so that none is printed.",
    "lspci, dmesg or the like shows it",
    "The queue pair and all that it has outstanding is flushed.",
    "A request, the flushing of which may take a while.",
    "It frees what there is.",
    "Some of it is no fault of theirs.",
    "a right that this adapter has not.",
    "The message has not the marks of a client.",
    "The memory is not used any more.",
    "The queue pair looks for its peer no more.",
    "What the completion brings besides.",
    "Every request but for the cancelled ones.",
    "It asks first, lest it be refused.",
    "The address is no address of this adapter.",
    "It has the format of what they exchange.",
    "It wakes for what else there is.",
    "The slot of the message. Of an offer, None.",
    "It waits. Who is refused tries again.",
    "The connection is lost after so many bytes.",
    "No status tells of it.",
    "All calls raise, but those that close.",
    "rxe does this otherwise than siw.",
    "It is called under the lock, as is its twin.",
    "The one of them with this number.",
    "The buffer is kept, also if the program drops it.",
    "Some adapters report it so.",
    "The mended fault brings a test.",
    "It ends a receive of the peer, which so learns of it.",
    "The MTU is TCP's affair.",
    "It can be made once and again.",
)
GOOD = (
    "The region's buffer is None.",
    "0 if there is none.",
    "0 if there\n    is none.",
    "Then there\n    is no region.",
    "The address is no longer used, and there is no other.",
    "Compare it with what the peer registered.",
    "It makes so many that memory ends.",
    "Who makes the faults?",
    "It ends, as is usual.",
    "It also ends if the peer ends.",
    "It fails so often that nobody uses it.",
    "It has not answered yet.",
    "The connection has not been made.",
    "Take completions until there are no more.",
    "It takes any more completions that have come.",
    "The memory is no longer used.",
    "All requests that are outstanding are flushed.",
    "A queue of at most one more entry.",
    "Raises InvalidFlagsError for an unknown bit and UnsupportedError for a right that this adapter lacks.",
)


def hits(path: Path, text: str) -> "list[tuple[int, str, str]]":
    path.write_text(text, encoding="utf-8")
    return list(prose.found(path, prose.signs()))


@pytest.mark.parametrize("sentence", BAD)
def test_a_bad_sentence_is_found(tmp_path: Path, sentence: str) -> None:
    assert hits(tmp_path / "page.md", sentence)


@pytest.mark.parametrize("sentence", GOOD)
def test_a_good_sentence_passes(tmp_path: Path, sentence: str) -> None:
    assert hits(tmp_path / "page.md", sentence) == []


def test_every_sign_has_a_bad_sentence() -> None:
    for sign in prose.signs():
        assert any(sign.pattern.search(sentence) for sentence in BAD), sign.pattern.pattern


def test_a_sentence_goes_over_lines_and_a_paragraph_ends_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert [line for line, *_ in hits(page, "First.\n\nAn adapter has\n  not\nthe right.\n")] == [3]
    assert hits(page, "An adapter has\n\nnot the right.\n") == []


def test_code_of_a_page_is_not_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert hits(page, "Run it:\n\n```console\n$ all that\n```\n\n    all that\n\n`all that` <!-- all that -->\n") == []
    assert [line for line, *_ in hits(page, "```\nall that\n```\nWith all that.\n")] == [4]


def test_docstrings_and_messages_of_a_program_are_read(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    source = (
        '# all that a comment says\n"""Has all that."""\n\ndef f(n):\n    raise ValueError(f"not all {n} that "\n      '
        '  f"all that")\n'
    )
    assert [line for line, *_ in hits(program, source)] == [2, 5]


def test_messages_of_c_are_read(tmp_path: Path) -> None:
    source = '/* all that is */\n// all that is\nchar c = \'"\';\nfail("Has all "\n     "that.");\n'
    assert [line for line, *_ in hits(tmp_path / "program.c", source)] == [4]


def test_a_line_of_the_list_without_a_remedy_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prose.txt"
    path.write_text("# a comment\nall that\n", encoding="utf-8")
    with pytest.raises(ValueError, match=re.escape("'all that' is not an expression")):
        prose.signs(path)


def test_pages_and_programs_are_searched() -> None:
    files = prose.files()
    assert {"docs/architecture.md", "ndpy/__init__.py", "cdefs/core/exports.c", "tests/mutants/README.md"} <= set(files)
    assert not [name for name in files if name.startswith("tests/") and not name.endswith(".md")]
