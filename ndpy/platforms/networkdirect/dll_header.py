"""Reads from a DLL's header which processor it is built for. Works on any system."""

from __future__ import annotations

import struct
import sys

_MACHINES = {0x014C: "x86", 0x8664: "x64", 0xAA64: "arm64", 0x01C4: "arm"}


def machine(path: str) -> str:
    """Return the processor that a DLL or program is built for: "x64", "x86", "arm64", "arm", or a hexadecimal number.

    Raises OSError if the file cannot be read, and ValueError if it is not a Windows program or DLL.
    Source: the PE format.
    """
    with open(path, "rb") as file:
        head = file.read(64)
        if len(head) < 64 or head[:2] != b"MZ":
            raise ValueError(f"{path} is not a DLL: it does not begin with MZ")
        file.seek(struct.unpack_from("<I", head, 60)[0])
        signature = file.read(6)
    if len(signature) < 6 or signature[:4] != b"PE\0\0":
        raise ValueError(f"{path} is not a DLL: it has no PE header")
    number = struct.unpack_from("<H", signature, 4)[0]
    return _MACHINES.get(number, f"{number:#06x}")


def own_machine() -> str:
    """Return the processor that this program, and so each DLL in it, is built for."""
    try:
        return machine(sys.executable)
    except (OSError, ValueError):
        return "x64" if struct.calcsize("P") == 8 else "x86"


def bitness(path: str) -> str:
    """Return why this process cannot load the DLL: the wrong processor, or not a DLL. "" for neither."""
    try:
        built_for = machine(path)
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    except ValueError as error:
        return str(error).replace(path, "it")
    own = own_machine()
    if built_for == own:
        return ""
    return f"it is built for {built_for}, and this Python is an {own} program; use a Python of the DLL's kind"
