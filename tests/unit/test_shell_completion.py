"""A shell completes the words of ndpy: a person's keys are sent to it in a terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.helpers import STRESS

if sys.platform != "linux":
    pytest.skip("needs a terminal of Linux", allow_module_level=True)

import pty

#: How a shell begins without the user's own files, and what it reads then.
SHELLS = {
    "bash": (
        ["bash", "--norc", "--noprofile", "-i"],
        'bind "set enable-bracketed-paste off"; eval "$(ndpy completion bash)"',
    ),
    "zsh": (["zsh", "-f", "-i"], 'autoload -Uz compinit; compinit -u -D; eval "$(ndpy completion zsh)"'),
    "fish": (["fish", "--no-config", "-i"], "ndpy completion fish | source"),
}
CONTROL = re.compile(r"\x1b\[[0-9;?>=]*[a-zA-Z]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07|\x1b[=>]|[\r\x07\x08]|\x1b")


class Terminal:
    """A shell in a terminal."""

    def __init__(self, words: list[str], home: Path) -> None:
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            own = Path(sys.executable).parent
            variables = {"PATH": f"{own}:{os.environ['PATH']}", "HOME": str(home), "TERM": "xterm", "PS1": "> "}
            os.chdir(home)
            os.execvpe(words[0], words, variables)
        self.seen = ""

    def write(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def read_until(self, pattern: str) -> str:
        """What the shell showed since the last call, up to this."""
        end = time.monotonic() + patient(30)
        while not (found := re.search(pattern, CONTROL.sub("", self.seen))):
            left = end - time.monotonic()
            assert left > 0, f"no {pattern!r} in {self.seen!r}"
            if select.select([self._terminal], [], [], left)[0]:
                self.seen += os.read(self._terminal, 4096).decode(errors="replace")
                # fish asks the terminal what it is, and waits.
                if self.seen.endswith("\x1b[0c") or "\x1b[c" in self.seen[-16:]:
                    self.write("\x1b[?6c")
        shown, self.seen = found.string[: found.end()], ""
        return shown

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._terminal)
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_values(shell, tmp_path):
    if shell != "bash" and not STRESS:
        pytest.skip("the usual run looks at bash only (NDPY_STRESS=1)")
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    words, begin = SHELLS[shell]
    terminal = Terminal(words, tmp_path)
    try:
        # The shell echoes the line, so the line must not have the word that is waited for.
        terminal.write(f"{begin}; echo rea''dy\n")
        terminal.read_until(r"ready\s")
        for typed, completed in (
            ("ndpy doct", "ndpy doctor "),
            ("ndpy soft pa", "ndpy soft path "),
            ("ndpy completion fi", "ndpy completion fish "),
            ("ndpy vm run --keep-", "ndpy vm run --keep-log "),
        ):
            terminal.write(f"{typed}\t")
            terminal.read_until(re.escape(completed))
            terminal.write("\x15")
    finally:
        terminal.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_without_the_shell_its_text_is_there_all_the_same(shell, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from ndpy.tools.cli import main

    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(main, ["completion", shell], prog_name="ndpy")
    assert done.exit_code == 0, done.output
    assert "_NDPY_COMPLETE" in done.output
