"""Runs a program. Each line of its standard input sends it SIGINT, as Ctrl-C does.

python interruptible.py PROGRAM ARGUMENTS. It works the same on every system, without a terminal or a console.
"""

import os
import runpy
import signal
import sys
import threading


def interrupt() -> None:
    # A terminal signals the main thread, so its wait ends. pthread_kill() does the same on systems that have it.
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
