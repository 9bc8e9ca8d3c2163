"""Every example in the documentation runs, and prints what its page shows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pages import OTHER_PYTHON, PAGES, ROOT, Page, matches

#: Their examples are of other adapters than soft0, and have tests of their own in tests/contract.
ELSEWHERE = {"docs/faults.md", "docs/verbs.md"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_examples_of_a_page_run(path: Path, tmp_path: Path) -> None:
    page = Page(path)
    if page.needs_other_python and not OTHER_PYTHON.exists():
        pytest.skip("no environment with pyverbs and ibverbs: rig/setup.sh bench")
    if page.runs and path.relative_to(ROOT).as_posix() not in ELSEWHERE:
        page.run(tmp_path)


def test_no_example_throws_completions_away_unseen() -> None:
    for path in PAGES:
        for block in Page(path).blocks:
            if block.word == "python" and not block.not_run:
                calls = [each.value for each in ast.walk(ast.parse(block.text)) if isinstance(each, ast.Expr)]
                assert not [ast.unparse(each) for each in calls if ast.unparse(each).startswith("queue.wait(")], path


@pytest.mark.parametrize(
    ("expected", "printed", "alike"),
    [
        (["took 3 ms"], ["took 12.5 ms"], True),
        (["took 3 ms"], ["took 3 s"], False),
        (["a", "...", "z"], ["a", "b", "c", "z"], True),
        (["a", "...", "z"], ["a", "b"], False),
        (["soft0 on [...]"], ["soft0 on a machine"], True),
        ([], ["more"], False),
    ],
)
def test_what_a_page_shows_is_compared_but_for_numbers(expected: list[str], printed: list[str], alike: bool) -> None:
    assert matches(expected, printed) == alike


def test_a_page_whose_output_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Page\n\n```console\n$ echo one\ntwo\n```\n")
    with pytest.raises(AssertionError, match="The page shows\n\ntwo"):
        Page(page).run(tmp_path)


def test_a_server_of_a_page_is_waited_for_and_ends_by_ctrl_c(tmp_path: Path) -> None:
    server = (
        "import time\nprint('listening')\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('ended')\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        f"<!-- file: server.py -->\n```python\n{server}```\n\n```console\nserver$ python "
        "server.py\nlistening\nended\n^C\n```\n\n```console\nclient$ echo hello\nhello\n```\n"
    )
    Page(page).run(tmp_path)


def test_the_workflows_of_the_page_on_ci_install_what_the_template_does() -> None:
    template = (ROOT / "examples/testing/.github/workflows/tests.yml").read_text("utf-8")
    shown = [block.text for block in Page(ROOT / "docs/howto/ci.md").blocks if block.word == "yaml"]
    assert len(shown) == 2
    needed = {"rdma-core", "qemu-system-x86", "busybox-static"}
    for text in (template, *shown):
        installed = {word for line in text.splitlines() if "apt-get install" in line for word in line.split()}
        assert needed <= installed
        assert any(word.startswith("linux-image-") for word in installed)
        assert "pytest --rdma vm" in text
