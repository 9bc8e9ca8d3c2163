"""softnd: where its DLL is, and its entry in the Winsock catalogue.

The search and the entry's values need no Windows; register() and unregister() change the catalogue of this machine.
"""

from __future__ import annotations

import ctypes
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from ndpy import errors
from ndpy.networkdirect import catalogue

NAME = "softnd, NetworkDirect in software"
# What the catalogue knows softnd by. A fixed one, so that a second registration is seen to be one.
PROVIDER_ID = uuid.UUID("ec51208c-eea5-4ad2-84bb-6e8b078dd346")

_AF_INET6 = 23
# ERROR_ACCESS_DENIED, ERROR_ELEVATION_REQUIRED, WSAEACCES, and WSANO_RECOVERY, which Winsock gives where its part of the
# registry may not be written.
_NOT_ALLOWED = (5, 740, 10013, 11003)

_HERE = Path(__file__).resolve().parent


def find(package: Path = _HERE) -> Path:
    """softnd.dll: beside the package, where the wheel for Windows has it, or in a checkout's softnd/build.

    Raises ProviderNotFoundError, which says how to get it.
    """
    checkout = package.parent.parent / "softnd"
    for path in (package / "softnd.dll", checkout / "build" / "softnd.dll"):
        if path.is_file():
            return path
    if (checkout / "Makefile").is_file():
        raise errors.ProviderNotFoundError(
            f"softnd.dll is not built: run `make softnd` in {checkout.parent} (needs x86_64-w64-mingw32-gcc)"
        )
    raise errors.ProviderNotFoundError(
        "this installation of ndpy has no softnd.dll: ndpy's wheel for Windows contains it (pip download ndpy --only-binary=:all: "
        "--platform win_amd64), and `make softnd` builds it in a checkout"
    )


def catalogue_entry() -> catalogue.WinsockProtocol:
    """The entry that register() makes (contract A.1.2 to A.1.6); IPv6's, which stands for both families."""
    return catalogue.WinsockProtocol(
        name=NAME,
        provider_id=PROVIDER_ID.bytes_le,
        service_flags=catalogue.SERVICE_FLAGS,
        provider_flags=catalogue.PFL_HIDDEN | catalogue.PFL_NETWORKDIRECT_PROVIDER,
        version=0x20000,
        address_family=_AF_INET6,
        socket_type=catalogue.SOCKET_TYPE,
        protocol=0,
        protocol_max_offset=0,
    )


def registered() -> catalogue.Entry | None:
    """softnd's entry in the catalogue, or None."""
    _require_windows()
    return next((entry for entry in catalogue.entries() if entry.provider_id == PROVIDER_ID.bytes_le), None)


def register(path: Path, say: Callable[[str], None] = lambda text: None) -> bool:
    """Let every NetworkDirect program of this machine find the DLL; whether anything had to be changed.

    path: of the DLL, which has to stay there. say: is told what is being done. Raises PermissionError for who is no
    administrator, ProviderError for whatever else Winsock refuses. Source: WSCInstallProvider.
    """
    present = registered()
    if present is not None and not present.problem and _same(present.path, path):
        say(f"the catalogue names {path} already")
        return False
    if present is not None:
        say(f"removing the entry for {present.path or 'a DLL that is not told'}")
        _deinstall()
    say(f"adding an entry for {path}")
    _install(path)
    made = registered()
    if made is None or not _same(made.path, path):
        raise errors.ProviderError(
            f"Winsock took the entry, but does not show it (Wine keeps no catalogue); set NDPY_PROVIDER={path} instead",
            operation="WSCInstallProvider",
        )
    say("done")
    return True


def unregister(say: Callable[[str], None] = lambda text: None) -> bool:
    """Remove softnd's entry; whether there was one. Raises as register() does. Source: WSCDeinstallProvider."""
    present = registered()
    if present is None:
        say("the catalogue has no entry for softnd")
        return False
    say(f"removing the entry for {present.path or 'a DLL that is not told'}")
    _deinstall()
    if registered() is not None:
        raise errors.ProviderError(
            "Winsock took the order, but still shows the entry", operation="WSCDeinstallProvider"
        )
    say("done")
    return True


def _same(one: str, other: Path) -> bool:
    return os.path.normcase(os.path.abspath(one)) == os.path.normcase(os.path.abspath(other)) if one else False


def _require_windows() -> None:
    if sys.platform != "win32":
        raise errors.UnsupportedError(
            "the Winsock catalogue is Windows'; here, `ndpy softroce up` makes a software adapter",
            operation="change the catalogue",
        )


def _install(path: Path) -> None:
    from ndpy.networkdirect.library import ffi, lib

    entry = catalogue_entry()
    native = ffi.new("struct nd_protocol *")
    native.name = entry.name
    native.service_flags = entry.service_flags
    native.provider_flags = entry.provider_flags
    native.version = entry.version
    native.address_family = entry.address_family
    native.socket_type = entry.socket_type
    native.protocol = entry.protocol
    native.protocol_max_offset = entry.protocol_max_offset
    _check("WSCInstallProvider", lib.ndpy_install_provider(entry.provider_id, str(path), native))


def _deinstall() -> None:
    from ndpy.networkdirect.library import lib

    _check("WSCDeinstallProvider", lib.ndpy_deinstall_provider(PROVIDER_ID.bytes_le))


def _check(operation: str, number: int) -> None:
    if number:
        raise change_error(operation, number, administrator=_is_administrator())


def change_error(operation: str, number: int, *, administrator: bool) -> errors.ProviderError:
    """What a refused change of the catalogue means."""
    if number in _NOT_ALLOWED and not administrator:
        return errors.PermissionError(
            "only an administrator may change the Winsock catalogue: run this in a console opened by "
            '"Run as administrator"',
            operation=operation,
            native=number,
            native_name="",
        )
    return errors.ProviderError(
        "Winsock refuses to change its catalogue", operation=operation, native=number, native_name=""
    )


def _is_administrator() -> bool:
    if sys.platform != "win32":
        return os.geteuid() == 0
    return bool(ctypes.windll.shell32.IsUserAnAdmin())
