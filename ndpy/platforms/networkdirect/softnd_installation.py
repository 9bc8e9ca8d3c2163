"""Finds softnd's DLL and registers it in the Winsock catalogue. Each version of NetworkDirect has its own entry.

find() and catalogue_entry() work on any system. register() and unregister() change the catalogue of this machine.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

from ndpy import errors
from ndpy.platforms.networkdirect import winsock_catalogue

NAME = "softnd, NetworkDirect in software"
DLL = "softnd.dll"
# The GUIDs of softnd's two entries: a GUID stands for one provider (contract A.1.7). They are fixed, so that a second
# registration finds the first.
PROVIDER_ID = uuid.UUID("ec51208c-eea5-4ad2-84bb-6e8b078dd346")
PROVIDER_IDS = {2: PROVIDER_ID, 1: uuid.UUID("45198134-8371-4076-ba0c-5da6b7899b19")}

_AF_INET6 = 23
# ERROR_ACCESS_DENIED, ERROR_ELEVATION_REQUIRED, WSAEACCES and WSANO_RECOVERY. Winsock gives the last one if the user
# may not write to its part of the registry.
_NOT_ALLOWED = (5, 740, 10013, 11003)

_PACKAGE = Path(__file__).resolve().parents[2]


def find(package: Path = _PACKAGE) -> Path:
    """Return the path of softnd.dll. The wheel for Windows has it in the package, and a checkout in softrdma/build.

    Raises ProviderNotFoundError, which says how to get it.
    """
    checkout = package.parent / "softrdma"
    for path in (package / "networkdirect" / DLL, checkout / "build" / DLL):
        if path.is_file():
            return path
    if (checkout / "Makefile").is_file():
        raise errors.ProviderNotFoundError(
            f"softnd.dll is not built: run `make softnd` in {checkout.parent} (needs x86_64-w64-mingw32-gcc)"
        )
    raise errors.ProviderNotFoundError(
        "this installation of ndpy has no softnd.dll: ndpy's wheel for Windows contains it (pip download ndpy "
        "--only-binary=:all: --platform win_amd64), and `make softnd` builds it in a checkout"
    )


def catalogue_entry(version: int = 2) -> winsock_catalogue.WinsockProtocol:
    """Return the entry that register() makes for a version (contract A.1.2 to A.1.6).

    An entry for IPv6 stands for both families.
    """
    return winsock_catalogue.WinsockProtocol(
        name=NAME if version == 2 else f"{NAME}, version 1",
        provider_id=PROVIDER_IDS[version].bytes_le,
        service_flags=winsock_catalogue.SERVICE_FLAGS,
        provider_flags=winsock_catalogue.PFL_HIDDEN | winsock_catalogue.PFL_NETWORKDIRECT_PROVIDER,
        version=0x20000 if version == 2 else 1,
        address_family=_AF_INET6,
        socket_type=winsock_catalogue.SOCKET_TYPE,
        protocol=0,
        protocol_max_offset=0,
    )


def registered(version: int = 2) -> winsock_catalogue.Entry | None:
    """Return softnd's entry in the catalogue for a version, or None."""
    _require_windows()
    provider_id = PROVIDER_IDS[version].bytes_le
    return next((entry for entry in winsock_catalogue.entries() if entry.provider_id == provider_id), None)


def register(path: Path, say: Callable[[str], None] = lambda text: None) -> bool:
    """Register the DLL for versions 2 and 1, so that every NetworkDirect program of this machine finds it.

    Parameters:
        path: the DLL's path. The DLL has to stay there.
        say: called with a text for each step.
    Returns: whether the catalogue was changed.
    Raises:
        PermissionError: the user is not an administrator.
        ProviderError: Winsock refuses for another reason.
    Source: WSCInstallProvider.
    """
    changes = [version for version in PROVIDER_IDS if _register(path, version, say)]
    say("done" if changes else f"the catalogue names {path} already")
    return bool(changes)


def _register(path: Path, version: int, say: Callable[[str], None]) -> bool:
    present = registered(version)
    if present is not None and not present.problem and _same(present.path, path):
        return False
    if present is not None:
        say(f"removing the entry of version {version} for {present.path or 'an unknown DLL'}")
        _deinstall(version)
    say(f"adding an entry of version {version} for {path}")
    _install(path, version)
    made = registered(version)
    if made is None or not _same(made.path, path):
        raise errors.ProviderError(
            f"Winsock reports success, but does not show the entry (Wine keeps no catalogue); set NDPY_PROVIDER={path} "
            f"instead",
            operation="WSCInstallProvider",
        )
    return True


def unregister(say: Callable[[str], None] = lambda text: None) -> bool:
    """Remove softnd's entries.

    Parameters:
        say: called with a text for each step.
    Returns: whether there was an entry.
    Raises:
        PermissionError: the user is not an administrator.
        ProviderError: Winsock refuses for another reason.
    Source: WSCDeinstallProvider.
    """
    present = {version: entry for version in PROVIDER_IDS if (entry := registered(version)) is not None}
    for version, entry in present.items():
        say(f"removing the entry of version {version} for {entry.path or 'an unknown DLL'}")
        _deinstall(version)
        if registered(version) is not None:
            raise errors.ProviderError(
                "Winsock reports success, but still shows the entry", operation="WSCDeinstallProvider"
            )
    say("done" if present else "the catalogue has no entry for softnd")
    return bool(present)


def _same(one: str, other: Path) -> bool:
    return os.path.normcase(os.path.abspath(one)) == os.path.normcase(os.path.abspath(other)) if one else False


def _require_windows() -> None:
    if sys.platform != "win32":
        raise errors.UnsupportedError(
            "the Winsock catalogue is Windows'; here, `ndpy softroce up` makes a software adapter",
            operation="change the catalogue",
        )


def _install(path: Path, version: int = 2) -> None:
    from ndpy.platforms.networkdirect.native_calls import ffi, lib

    entry = catalogue_entry(version)
    native = ffi.new("struct nd_protocol *")
    for field in dataclasses.fields(entry):
        if field.name != "provider_id":
            setattr(native, field.name, getattr(entry, field.name))
    _check("WSCInstallProvider", lib.ndpy_install_provider(entry.provider_id, str(path), native))


def _deinstall(version: int) -> None:
    from ndpy.platforms.networkdirect.native_calls import lib

    _check("WSCDeinstallProvider", lib.ndpy_deinstall_provider(PROVIDER_IDS[version].bytes_le))


def _check(operation: str, number: int) -> None:
    if number:
        raise change_error(operation, number, administrator=_is_administrator())


def change_error(operation: str, number: int, *, administrator: bool) -> errors.ProviderError:
    """Return the exception for a refused change of the catalogue."""
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
