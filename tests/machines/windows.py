"""Examines the Windows machines of this folder with ndpy, on Linux, and prints what it finds as examine.py does.

A description has the Winsock catalogue, the DLLs of providers and the network interfaces. The rules of ndpy decide;
calls of the DLLs are answered from the description.

python windows.py --write [NAME…] writes NAME.expected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import types
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from machine import FOLDER, Item, read, settled


class _Compiled(types.ModuleType):
    """In place of the compiled module, which only Windows has. Nothing here calls it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return mock.MagicMock(name=name)


sys.modules["ndpy._networkdirect"] = _Compiled("ndpy._networkdirect")

from ndpy import errors  # noqa: E402
from ndpy.platforms.networkdirect import adapter_info, dll_header, winsock_catalogue  # noqa: E402
from ndpy.tools.doctor import findings, windows  # noqa: E402
from ndpy.vocabulary.flags import Capability  # noqa: E402
from ndpy.vocabulary.info import as_named  # noqa: E402

# The numbers of contract A.1.2 to A.1.5.
_RIGHT = {"service_flags": 0x8E, "version": 0x20000, "address_family": 23, "socket_type": -1}
_FLAGS = {1: 0x04, 2: 0x14}


class Machine:
    """A Windows machine, as its description says."""

    def __init__(self, path: Path) -> None:
        top = read(path)
        self.unsettled = [item.rest for item in top.all("unsettled")]
        self.entries = [_entry(number, item) for number, item in enumerate(top.all("entry"))]
        self.paths = {
            entry.provider_id: item.get("path") for entry, item in zip(self.entries, top.all("entry"), strict=True)
        }
        self.dlls = {item.rest: item for item in top.all("dll")}
        self.interfaces = {item.rest: item for item in top.all("interface")}

    def addresses(self) -> dict[str, list[SimpleNamespace]]:
        return {
            name: [
                SimpleNamespace(address=own.rest, family=socket.AF_INET6 if ":" in own.rest else socket.AF_INET)
                for own in interface.all("address")
            ]
            for name, interface in self.interfaces.items()
        }

    def statistics(self) -> dict[str, SimpleNamespace]:
        return {
            name: SimpleNamespace(isup=interface.get("state", "up") == "up", mtu=int(interface.get("mtu", "1500")))
            for name, interface in self.interfaces.items()
        }


def _entry(number: int, item: Item) -> winsock_catalogue.WinsockProtocol:
    """Lines such as "version 0x1" give a value that a right entry does not have."""
    values = {name: int(item.get(name), 0) if item.get(name) else right for name, right in _RIGHT.items()}
    meant = winsock_catalogue.VERSIONS.get(values["version"], 2)
    provider_flags = int(item.get("provider_flags"), 0) if item.get("provider_flags") else _FLAGS[meant]
    provider_id = uuid.UUID(int=0x1000 + number).bytes_le
    return winsock_catalogue.WinsockProtocol(
        name=item.rest,
        provider_id=provider_id,
        provider_flags=provider_flags,
        protocol=0,
        protocol_max_offset=0,
        **values,
    )


class Provider:
    """In place of a loaded DLL."""

    machine: Machine

    def __init__(self, path: str, dll: Item) -> None:
        self.path = path
        self._dll = dll

    @classmethod
    def use(cls, path: str) -> Provider:
        dll = cls.machine.dlls.get(path)
        if dll is None or dll.get("fails"):
            raise errors.ProviderNotFoundError(f"{path} {dll.get('fails') if dll else 'does not exist'}")
        return cls(path, dll)

    def drop(self) -> None:
        pass

    def serves(self, version: int, provider_id: str = "") -> bool:
        del provider_id
        return bool(self._dll.all(f"version{version}"))

    def version(self, asked: int | None, provider_id: str = "") -> int:
        served = [version for version in (2, 1) if self.serves(version, provider_id)]
        if not served:
            raise errors.ProviderError(f"{self.path} serves no version", operation="load provider", native=0x80004002)
        if asked not in (None, *served):
            raise errors.UnsupportedError(f"{self.path} serves NetworkDirect version {3 - asked} only")
        return asked or served[0]

    def adapters(self, provider_id: str = "") -> dict[int, list[str]]:
        del provider_id
        return {number: item.words[1:] for number, item in enumerate(self._dll.all("version2"), 1) if item.words[1:]}

    def addresses_of_version_1(self) -> list[str]:
        return [address for item in self._dll.all("version1") for address in item.words[1:]]


def examine(machine: Machine) -> str:
    infos = adapter_info.list_adapters()
    parts = {"devices": _devices(infos), "doctor": _doctor(), "open_adapter": _opened(machine, infos)}
    lines = []
    for part, found in parts.items():
        lines += settled(machine.unsettled, part, found)
    return "\n".join(lines) + "\n"


def _devices(infos: list[adapter_info.AdapterInfo]) -> Iterator[str]:
    for info in infos:
        yield (
            f"{info.name}: NetworkDirect {info.version}, {info.driver}, {info.state}, MTU {info.mtu}, "
            f"{info.netdev or 'no interface'}"
        )
        yield f"    {', '.join(info.addresses)}"


def _doctor() -> Iterator[str]:
    found = windows.diagnose()
    for finding in found:
        yield f"{finding.verdict.value} {finding.check}"
        if finding.remedy:
            yield f"    {finding.message}"
            yield f"    remedy: {finding.remedy}"
    yield f"exit status {int(any(finding.verdict is findings.Verdict.FAIL for finding in found))}"


def _opened(machine: Machine, infos: list[adapter_info.AdapterInfo]) -> Iterator[str]:
    active = next((info for info in infos if info.state == "active"), None)
    yield f"-: {active.name if active else 'AdapterNotFoundError'}"
    own = [address.rest for interface in machine.interfaces.values() for address in interface.all("address")]
    for name in [*(info.name for info in infos), *machine.interfaces, *own]:
        named = next(filter(None, (as_named(info, name) for info in infos)), None)
        yield f"{name}: {named.name if named else 'AdapterNotFoundError'}"


def _examine_here(
    check: str, module: str, function: str, *arguments: str, limit_s: float = 0
) -> list[findings.Finding]:
    del limit_s
    return findings.examine(check, getattr(sys.modules[module], function), *arguments)


def on(machine: Machine) -> str:
    """Examine the machine in place of this one."""
    limits = dict.fromkeys(adapter_info._LIMITS, 0) | {"max_window_size": 0}
    Provider.machine = machine
    with contextlib.ExitStack() as stack:
        for where, name, value in (
            (winsock_catalogue, "protocols", lambda: machine.entries),
            (winsock_catalogue, "provider_path", lambda provider_id: (machine.paths[provider_id], "")),
            (adapter_info, "Provider", Provider),
            (sys.modules["ndpy.platforms.networkdirect.provider_dll"], "Provider", Provider),
            (adapter_info, "_examine", lambda *arguments: (limits, Capability.NONE)),
            (adapter_info.version1, "examine", lambda *arguments: (limits, Capability.NONE)),
            (adapter_info.version1, "addresses", lambda provider, _: provider.addresses_of_version_1()),
            (adapter_info.interfaces, "addresses", machine.addresses),
            (adapter_info.interfaces, "statistics", machine.statistics),
            (windows, "examine_apart", _examine_here),
            (dll_header, "own_machine", lambda: "x64"),
            (dll_header, "machine", lambda path: machine.dlls[path].get("machine", "x64")),
            (dll_header, "bitness", lambda path: machine.dlls[path].get("unfit")),
            (os.path, "exists", lambda path: path in machine.dlls),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        return examine(machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write what is found into NAME.expected")
    arguments = parser.parse_args()
    for name in ("NDPY_PROVIDER", "NDPY_PROVIDER_VERSION", "NDPY_ADAPTER"):
        os.environ.pop(name, None)
    paths = [path for path in sorted(FOLDER.glob("*.windows")) if not arguments.names or path.stem in arguments.names]
    answers = {path.stem: {"found": on(Machine(path))} for path in paths}
    if arguments.write:
        for path in paths:
            path.with_suffix(".expected").write_text(answers[path.stem]["found"], encoding="utf-8")
    else:
        json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
