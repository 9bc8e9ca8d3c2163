"""Builds the site of the documentation: HTML, each page as Markdown beside it, and llms.txt, which lists these.

    .venv/bin/python docs/build.py [FOLDER]

FOLDER is docs/_build/html unless it is named. It needs no network. A warning ends it with the exit status 1.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent


def sphinx(builder: str, folder: Path) -> None:
    cache = folder.parent / "doctrees"
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", builder, "-d", cache, DOCS, folder]
    if subprocess.run(command).returncode:
        raise SystemExit(
            "docs: Sphinx has found mistakes. `rig/setup.sh docs` installs what it needs, and builds ndpy."
        )


def title_and_summary(page: str) -> tuple[str, str]:
    """The heading of a page in Markdown and its first sentence."""
    title = re.search(r"^# (.+)$", page, re.M)
    after = page[title.end() :] if title else page
    first = re.search(r"^(?![#<>|`\-*\[!(\s])(.+(?:\n.+)*)", after, re.M)
    text = " ".join(first[1].split()) if first else ""
    return (title[1].strip() if title else ""), re.split(r"(?<=[.?]) ", text)[0]


def build(folder: Path) -> None:
    sphinx("html", folder)
    plain = folder.parent / "markdown"
    shutil.rmtree(plain, ignore_errors=True)
    sphinx("markdown", plain)
    lines = [
        "# ndpy",
        "",
        "> One Python API for RDMA adapters. Each page of its documentation is also plain Markdown.",
        "",
    ]
    for page in sorted(plain.rglob("*.md")):
        name = page.relative_to(plain)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(page, folder / name)
        title, summary = title_and_summary(page.read_text("utf-8"))
        lines.append(f"- [{title}]({name.as_posix()}){': ' if summary else ''}{summary}")
    (folder / "llms.txt").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve() if sys.argv[1:] else DOCS / "_build/html")
