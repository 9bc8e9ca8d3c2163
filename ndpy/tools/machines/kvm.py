"""Finds out whether KVM runs programs on this machine at the speed of the processor.

It is not enough that /dev/kvm can be opened and that QEMU starts with it. In a nested machine without hardware support,
KVM interprets every instruction, about two million per second. Then QEMU starts and small programs run, but no kernel
boots within minutes. So this module runs a program of 60 million instructions in a virtual machine. That takes some
20 ms if KVM works, and half a minute if it interprets.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from pathlib import Path

_DEVICE = "/dev/kvm"
_LIMIT_S = 3.0
_TURNS = 30_000_000
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

# QEMU maps a firmware of 64 KiB at 0xF0000 and starts it in real mode, at its last 16 bytes. It exits with status 2 n +
# 1 when the number n is written to the port of its device isa-debug-exit.
_BASE = 0xF0000
_SIZE = 0x10000
_START = 0xFFF0
_EXIT_PORT = 0xF4
_EXIT_NUMBER = 21
_DONE = 2 * _EXIT_NUMBER + 1


def _firmware() -> bytes:
    """A program that enters protected mode, counts down from _TURNS, and makes QEMU exit."""
    table = (
        bytes(8)  # no segment
        + bytes.fromhex("ffff0000009bcf00")  # selector 8: code, all 4 GiB, 32 bits
    )
    described = (len(table) - 1).to_bytes(2, "little") + _BASE.to_bytes(4, "little")
    real_mode = (
        b"\xfa"  # cli
        + b"\x2e\x66\x0f\x01\x16"  # lgdt cs:[...]
        + len(table).to_bytes(2, "little")
        + b"\x0f\x20\xc0"  # mov eax, cr0
        + b"\x0c\x01"  # or al, 1
        + b"\x0f\x22\xc0"  # mov cr0, eax
    )
    jump_length = 8
    begin = len(table) + len(described)
    protected_mode = _BASE + begin + len(real_mode) + jump_length
    jump = b"\x66\xea" + protected_mode.to_bytes(4, "little") + b"\x08\x00"  # jmp 8:...
    counting = (
        b"\xb9"  # mov ecx, ...
        + _TURNS.to_bytes(4, "little")
        + b"\x49"  # dec ecx
        + b"\x75\xfd"  # jnz to the dec
        + bytes((0xB0, _EXIT_NUMBER))  # mov al, ...
        + bytes((0xE6, _EXIT_PORT))  # out ..., al
        + b"\xf4"  # hlt
    )
    image = bytearray(_SIZE)
    program = table + described + real_mode + jump + counting
    image[: len(program)] = program
    image[_START : _START + 3] = b"\xe9" + ((begin - _START - 3) % _SIZE).to_bytes(2, "little")  # jmp to real_mode
    return bytes(image)


def _try(qemu: str, accelerator: tuple[str, ...] = ("kvm", "-cpu", "host")) -> bool:
    """Whether the program finishes within _LIMIT_S."""
    with tempfile.TemporaryDirectory(prefix="ndpy-kvm-") as folder:
        image = Path(folder, "firmware")
        image.write_bytes(_firmware())
        command = [qemu, "-accel", *accelerator, "-machine", "pc", "-m", "16", "-nodefaults", "-display", "none"]
        command += ["-no-reboot", "-bios", str(image), "-device", f"isa-debug-exit,iobase={_EXIT_PORT:#x},iosize=1"]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == _DONE


def _answer_file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ndpy", "kvm")


def _question(qemu: str) -> str:
    """What an answer is valid for: this boot of this machine, and this QEMU."""
    return f"{_BOOT_ID.read_text('ascii').strip()} {qemu} {os.stat(qemu).st_mtime_ns}"


def remember(qemu: str, answer: bool) -> None:
    """Store the answer until the machine reboots. If that fails, the next run finds out again."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _answer_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"kvm.{os.getpid()}")
        draft.write_text(f"{_question(qemu)} {'yes' if answer else 'no'}\n", encoding="utf-8")
        draft.replace(path)


def _remembered(qemu: str) -> bool | None:
    with contextlib.suppress(OSError, RuntimeError, UnicodeDecodeError):
        question, _, answer = _answer_file().read_text("utf-8").strip().rpartition(" ")
        if question == _question(qemu):
            return answer == "yes"
    return None


def works(qemu: str) -> bool:
    """Whether to boot with KVM. The first call after a reboot takes at most 3 s. Later calls use the stored answer."""
    if not os.access(_DEVICE, os.R_OK | os.W_OK):
        return False
    answer = _remembered(qemu)
    if answer is None:
        answer = _try(qemu)
        remember(qemu, answer)
    return answer
