"""Wine reports a crash in a program's output. Was it the program that crashed, or one of Wine's services?"""

from __future__ import annotations

import hostile
import pytest
from hostile import WindowsProcess

MESSAGE = "wine: Unhandled page fault on read access to 0000000000000008 at address 000000031CAA2391 (thread 0080)"

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(("status", "lines"), [(0, ["done"]), (5, ["done", MESSAGE])])
def test_a_crash_is_the_programs_if_the_program_failed(tmp_path, status, lines):
    hostile.windows_program("rping")  # skips if Wine is missing
    program = tmp_path / "program.py"
    program.write_text(f"print({MESSAGE!r}); print('done'); raise SystemExit({status})")
    with WindowsProcess(program, limit_s=60) as process:
        assert process.next_line() == "done"
        assert process.finish() == status
    assert process.lines == lines
