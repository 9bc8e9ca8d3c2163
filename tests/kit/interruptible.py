"""Runs a program. Each line of its standard input sends it SIGINT, as Ctrl-C does.

python interruptible.py PROGRAM ARGUMENTS. It works the same on every system, without a terminal or a console. With
NDPY_TEST_LOGGED=1 standard error gets what ndpy logs.
"""

import functools
import logging
import os
import runpy
import signal
import sys
import threading
import time


def interrupt() -> None:
    # A terminal signals the main thread, so its wait ends. pthread_kill() does the same on systems that have it.
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    else:
        signal.raise_signal(signal.SIGINT)


def wait_for_line() -> None:
    """Return when the input has something, or has ended.

    On Windows a read that waits holds the pipe. Whoever asks for the kind of the standard input then waits too, as the
    run-time library of a DLL does when the DLL is loaded.
    """
    if sys.platform == "win32":
        import ctypes
        import msvcrt

        pipe, available = msvcrt.get_osfhandle(0), ctypes.c_ulong(0)
        peek = ctypes.WinDLL("kernel32").PeekNamedPipe
        peek.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_ulong] + 3 * [ctypes.c_void_p]
        while peek(pipe, None, 0, None, ctypes.byref(available), None) and not available.value:
            time.sleep(0.02)


def interrupt_for_every_line() -> None:
    while True:
        wait_for_line()
        data = os.read(0, 64)
        if not data:
            return
        for _ in range(data.count(b"\n")):
            interrupt()


# The tests may run as a background job, which shells start with Ctrl-C ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A signal also sends a byte to the loop. Under Wine a socket to which another thread sends at the same time counts as
# full, of which Python would tell on standard error. The other thread's byte wakes the loop.
signal.set_wakeup_fd = functools.partial(signal.set_wakeup_fd, warn_on_full_buffer=False)
if os.environ.get("NDPY_TEST_LOGGED"):
    logging.basicConfig(level=logging.DEBUG)
del sys.argv[0]
threading.Thread(target=interrupt_for_every_line, daemon=True).start()
runpy.run_path(sys.argv[0], run_name="__main__")
