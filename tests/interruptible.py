"""Runs a program that gets SIGINT, which is what Ctrl-C sends, for every line of its standard input.

python interruptible.py PROGRAM ARGUMENTS. It works the same on every system, without a terminal or a console.
"""

import os
import runpy
import signal
import sys
import threading


def interrupt() -> None:
    # Where threads can be sent signals, the main thread gets it, as it does from a terminal, so that its wait ends.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


def interrupt_for_every_line() -> None:
    while data := os.read(0, 64):
        for _ in range(data.count(b"\n")):
            interrupt()


# The tests may run as a background job, which shells start with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
threading.Thread(target=interrupt_for_every_line, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
