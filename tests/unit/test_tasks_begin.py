"""Tasks of ndpy.aio that begin while Ctrl-C comes."""

from __future__ import annotations

import asyncio
import gc
import sys
import warnings

from ndpy.aio import tasks

#: Lines of the module that run until a task has begun. No run has more.
MOST_LINES = 20


class At:
    """Ctrl-C at a line of the module, counted from 0 while the loop runs its tasks."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename != tasks.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def begin(line: int) -> tuple[bool, bool]:
    """Start a task, with Ctrl-C at that line. Returns whether it came, and whether the task has begun."""
    began = []

    async def work():
        began.append(True)

    async def main():
        tasks.start(asyncio.get_running_loop(), work)
        sys.settrace(at)
        await asyncio.sleep(0)

    at, former, loop = At(line), sys.gettrace(), asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(former)
        loop.close()
    return at.left < 0, bool(began)


def test_ctrl_c_at_any_line_before_a_task_begins_leaves_no_coroutine_that_nobody_awaits():
    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        found = []
        for line in range(MOST_LINES):
            found.append(begin(line))
            gc.collect()
            if not found[-1][0]:
                break
    assert found[-1] == (False, True)
    assert (True, False) in found
    assert [str(each.message) for each in complaints] == []
