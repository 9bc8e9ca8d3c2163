"""Runs a program that gets SIGINT, which is what Ctrl-C sends, when its standard input ends.

python interruptible.py PROGRAM ARGUMENTS. It works the same on every system, without a terminal or a console.
"""

import os
import runpy
import signal
import sys
import threading


def interrupt_at_end_of_input() -> None:
    while os.read(0, 64):
        pass
    signal.raise_signal(signal.SIGINT)


# The tests may run as a background job, which shells start with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
threading.Thread(target=interrupt_at_end_of_input, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
