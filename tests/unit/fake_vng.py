"""A stand-in for virtme-ng, which plays the machines that it is told to."""

from __future__ import annotations

import sys
from pathlib import Path

from ndpy.tools.machines import tools, vm

# What every machine has: the ports and settings of its VM, and its steps. A test's own program follows.
PROGRAM = r"""
import os, pathlib, re, socket, sys, time
here = pathlib.Path(__file__).parent
words = " ".join(sys.argv)
job = pathlib.Path(next(word.partition("=")[2] for word in sys.argv if word.startswith("--rodir=")))
settings = dict(re.findall(r"^(\w+)='?(.*?)'?$", (job / "settings").read_text(), re.M))

def port(name):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(re.search(rf"path=(\S+/{name})\b", words)[1])
    return connection

def connect():
    global control, log, out, err
    control, log, out, err = map(port, ("control", "log", "out", "err"))

def ready():
    control.sendall(b"ready\n")
    assert control.recv(3) == b"go\n"
    log.sendall(f"6,1,1,-;ndpy: begin {settings['RUN']}\n".encode())

def say(text):
    out.sendall(text.encode())

def end(status, logged=""):
    if logged:
        log.sendall(f"4,2,2,-;{logged}\n".encode())
    control.sendall(f"status {status}\n".encode())
    out.sendall(settings["MARK"].encode())
    err.sendall(settings["MARK"].encode())
    log.sendall(f"6,3,3,-;ndpy: end {settings['RUN']}\n".encode())
    time.sleep(600)
"""


def install(monkeypatch, folder: Path, program: str) -> None:
    """Let the VMs of this process be machines of the program."""
    path = folder / "vng"
    path.write_text(f"#!{sys.executable}\n{PROGRAM}{program}")
    path.chmod(0o755)
    monkeypatch.setattr(tools, "missing", lambda programs: [])
    monkeypatch.setattr(tools, "find", lambda name: str(path))
    monkeypatch.setattr(tools, "find_kernel", lambda *arguments: tools.Kernel("7.2.13", Path("/boot/vmlinuz-7.2.13")))
    monkeypatch.setattr(vm, "_AFTER_PANIC_S", 0.3)
