"""Runs what a page of the documentation shows. docs/README.md says how a page is written for this.

.venv/bin/python tests/docs/pages.py PAGE...           runs these pages
.venv/bin/python tests/docs/pages.py --write PAGE...   and writes what was printed into them
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

# It is a program too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kit.deadlines import PROGRAM_DEADLINE_S as DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]

#: The Python of pyverbs and PyPI's ibverbs, which `rig/setup.sh bench` makes.
OTHER_PYTHON = ROOT / ".rig/bench/venv/bin/python"

#: Why a block does not run here.
REASONS = {
    "a card",
    "a fragment",
    "an index",
    "another machine",
    "another system",
    "root",
    "the VM",
    "a workflow",
    "shown elsewhere",
}

BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<word>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$|^<!--(?P<note>.*?)-->$", re.M | re.S
)
# A prompt is `$ `, or the name of a terminal before it: `server$ `.
PROMPT = re.compile(r"^(?P<terminal>[a-z0-9-]*)\$ (?P<command>.*)$")
# What a later command of the same terminal depends on.
STATE = re.compile(r"(export|cd|source|\.) ")


@dataclass
class Command:
    terminal: str
    text: str
    expected: list[str] = field(default_factory=list)
    #: Its last line is ^C: a person ends it.
    interrupted: bool = False


@dataclass
class Block:
    word: str
    text: str
    start: int
    end: int
    file: str = ""
    not_run: str = ""


def blocks(page: str) -> list[Block]:
    """The blocks of a page, and hidden code as blocks with the word `python`."""
    found, file, reason = [], "", ""
    for match in BLOCK.finditer(page):
        note = match["note"]
        if note is None:
            indent = len(match["indent"])
            lines = [line[indent:] for line in match["text"].splitlines(keepends=True)]
            word = match["word"].strip()
            found.append(Block(word, "".join(lines), match.start("text"), match.end("text"), file, reason))
            file = reason = ""
        elif note.startswith(" file: "):
            file = note[7:].strip()
        elif note.startswith(" not run: "):
            reason = note[10:].strip()
        elif note.startswith(" files of: "):
            other = (ROOT / "docs" / note[11:].strip()).read_text("utf-8")
            found += [block for block in blocks(other) if block.file]
        elif note.startswith(" python\n"):
            found.append(Block("python", note[8:], match.start(), match.start()))
    return found


def commands(text: str) -> list[Command]:
    found: list[Command] = []
    for line in text.splitlines():
        prompt = PROMPT.match(line)
        if found and found[-1].text.endswith("\\") and not found[-1].expected:
            found[-1].text += "\n" + line.lstrip("> ")
        elif prompt:
            found.append(Command(prompt["terminal"], prompt["command"]))
        elif not found:
            raise ValueError(f"a console block begins with a prompt, not with {line!r}")
        elif line == "^C":
            found[-1].interrupted = True
        else:
            found[-1].expected.append(line)
    return found


def is_old(command: Command) -> bool:
    """It runs with OTHER_PYTHON."""
    return command.terminal.partition("-")[0] == "old"


def normal(line: str) -> str:
    """Numbers, and the spaces that make columns of them, differ between two runs."""
    line = re.sub(r"\b(0x)?[0-9a-f]*\d[0-9a-f]*(\.\d+)?", "0", line)
    return re.sub(r"[\s─━]+", " ", line).strip()


def matches(expected: list[str], printed: list[str]) -> bool:
    """`...` stands for any lines, and `[...]` for any part of one."""
    if not expected:
        return not printed
    if expected[0].strip() == "...":
        return any(matches(expected[1:], printed[count:]) for count in range(len(printed) + 1))
    if not printed:
        return False
    pattern = ".*".join(re.escape(normal(part)) for part in expected[0].split("[...]"))
    return bool(re.fullmatch(pattern, normal(printed[0]))) and matches(expected[1:], printed[1:])


class Running:
    """A command of a page and what it prints."""

    def __init__(self, command: Command, before: list[str], folder: Path, environment: dict[str, str]) -> None:
        self.command = command
        script = "\n".join((*before, command.text))
        if is_old(command):
            environment = {**environment, "PATH": f"{OTHER_PYTHON.parent}{os.pathsep}{environment['PATH']}"}
        self.process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def wait_for_a_line(self) -> None:
        """Until it has printed the first line that the page shows: a server listens then."""
        ends = time.monotonic() + DEADLINE_S
        while not self.lines and self.process.poll() is None:
            if time.monotonic() > ends:
                raise AssertionError(f"`{self.command.text}` printed nothing within {DEADLINE_S:.0f} s")
            time.sleep(0.02)

    def finish(self) -> None:
        try:
            if self.command.interrupted:
                os.killpg(self.process.pid, signal.SIGINT)
            self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"`{self.command.text}` did not end within {DEADLINE_S:.0f} s. It printed:\n" + "\n".join(self.lines)
            ) from None
        finally:
            self.end()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(DEADLINE_S)

    @property
    def printed(self) -> list[str]:
        return [line for line in self.lines if line != "^C"]

    def check(self) -> None:
        if not matches(self.command.expected, self.printed):
            raise AssertionError(
                f"`{self.command.text}` printed\n\n" + "\n".join(self.printed) + "\n\nThe page shows\n\n"
                "" + "\n".join(self.command.expected)
            )


class Page:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.text = path.read_text("utf-8")
        self.blocks = blocks(self.text)
        for block in self.blocks:
            if block.not_run and block.not_run not in REASONS:
                raise ValueError(f"{path}: `not run: {block.not_run}` is none of {', '.join(sorted(REASONS))}")

    @property
    def needs_other_python(self) -> bool:
        shown = (block.text for block in self.blocks if block.word == "console" and not block.not_run)
        return any(is_old(command) for text in shown for command in commands(text))

    @property
    def runs(self) -> bool:
        return any(block.word in ("python", "console") and not block.not_run for block in self.blocks)

    def run(self, folder: Path, write: bool = False) -> None:
        program = []
        running: dict[str, Running] = {}
        state: dict[str, list[str]] = {}
        environment = dict(os.environ, PYTHONUNBUFFERED="1", COLUMNS="100", TERM="dumb")
        # Other plugins that are installed take time to load. tests/wheels has the sessions with them.
        environment.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_PLUGINS="pytest_ndpy")
        environment.setdefault("NDPY_ADAPTER", "soft0")
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        replaced = []
        try:
            for block in self.blocks:
                if block.not_run:
                    continue
                if block.file:
                    path = folder / block.file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(here(block.text), "utf-8")
                elif block.word == "python":
                    program.append(here(block.text))
                elif block.word == "console":
                    of_block = []
                    for command in commands(block.text):
                        earlier = running.pop(command.terminal, None)
                        if earlier is not None:
                            earlier.finish()
                            write or earlier.check()
                        for other in running.values():
                            if other.command.expected:
                                other.wait_for_a_line()
                        before = state.setdefault(command.terminal, [])
                        one = Running(
                            Command(**{**vars(command), "text": here(command.text)}), before, folder, environment
                        )
                        of_block.append((command, one))
                        if STATE.match(command.text):
                            before.append(one.command.text)
                        if command.terminal:
                            running[command.terminal] = one
                        else:
                            one.finish()
                            write or one.check()
                    replaced.append((block, of_block))
            # The first terminals are those of servers, which end by a Ctrl-C of a person when all others have ended.
            for one in sorted(running.values(), key=lambda one: one.command.interrupted):
                one.finish()
                write or one.check()
        finally:
            for one in running.values():
                one.end()
        if program:
            text = "\n".join(program)
            (folder / "page.py").write_text(text, "utf-8")
            one = Running(Command("", f"{sys.executable} page.py"), [], folder, environment)
            one.finish()
            if one.process.returncode:
                raise AssertionError(f"the examples of {self.path.name} failed:\n" + "\n".join(one.lines))
        if write:
            self.write(replaced)

    def write(self, replaced: list[tuple[Block, list[tuple[Command, Running]]]]) -> None:
        text = self.text
        for block, of_block in reversed(replaced):
            lines = []
            for command, one in of_block:
                lines.append(f"{command.terminal}$ {command.text}")
                lines += command.expected if matches(command.expected, one.printed) else there(one.printed)
                lines += ["^C"] if command.interrupted else []
            text = text[: block.start] + "\n".join(lines) + "\n" + text[block.end :]
        self.path.write_text(text, "utf-8")


#: The ports of pages, and the free ports that stand for them here: several runs may go on at once.
PORTS: dict[str, str] = {}


def free_port(match: re.Match[str]) -> str:
    if match[0] not in PORTS:
        with socket.socket() as one:
            one.bind(("", 0))
            PORTS[match[0]] = str(one.getsockname()[1])
    return PORTS[match[0]]


def here(text: str) -> str:
    """The addresses of pages, 192.0.2.1 and so on, are those of other machines. They all are this one."""
    return re.sub(r"\b747\d\b", free_port, re.sub(r"\b192\.0\.2\.\d+\b", "127.0.0.1", text))


def there(lines: list[str]) -> list[str]:
    for port, free in PORTS.items():
        lines = [line.replace(free, port) for line in lines]
    return [line.replace("127.0.0.1", "192.0.2.1") for line in lines]


#: All but the contract, which has no examples.
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if not {"_build", "contract"} & set(path.parts) and path != ROOT / "docs/README.md"]


if __name__ == "__main__":
    write = "--write" in sys.argv
    for name in (name for name in sys.argv[1:] if name != "--write"):
        with tempfile.TemporaryDirectory() as folder:
            Page(Path(name)).run(Path(folder), write)
        print(f"{name}: ran")
