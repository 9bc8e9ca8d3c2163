"""Examines NetworkDirect on this Windows machine: the Winsock catalogue, its providers and their addresses.

Providers are other people's DLLs. So each is loaded in a process of its own, whose crash or hang is a finding too.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator

from ndpy.errors import NdpyError, ProviderError, ProviderNotFoundError, UnsupportedError
from ndpy.platforms.networkdirect import dll_header, interfaces, winsock_catalogue
from ndpy.tools.doctor.findings import Finding, Verdict, examine, examine_apart, failed, passed, split_remedy, warned
from ndpy.vocabulary.addresses import Reach, plain_address, reach
from ndpy.vocabulary.info import as_named, is_address

# For a provider that is named by its path.
_NO_ID = "00000000-0000-0000-0000-000000000000"
_LIMIT_S = 60.0

_DRIVER = "install the adapter's driver again, with its NetworkDirect provider, from its maker"
_ANOTHER = "set NDPY_PROVIDER to the path of another DLL, such as `ndpy softnd path` prints, or unset it"
_GET_ONE = (
    "install the adapter's driver with its NetworkDirect provider; without an adapter, set NDPY_PROVIDER to the "
    "path that `ndpy softnd path` prints, or run `ndpy softnd register` as an administrator"
)
_OTHER_VERSION = "unset NDPY_PROVIDER_VERSION, or name another DLL in NDPY_PROVIDER"


def diagnose(adapter: str | None = None) -> list[Finding]:
    """Examine everything. adapter: a name or address, to leave out other adapters."""
    named = [path for path in os.environ.get("NDPY_PROVIDER", "").split(os.pathsep) if path]
    found = [examine_process(), *examine("catalogue", examine_catalogue)]
    if named:
        instead = "what NDPY_PROVIDER names is used instead of the catalogue"
        found.append(passed("NDPY_PROVIDER", f"{instead}: {', '.join(named)}"))
        version = os.environ.get("NDPY_PROVIDER_VERSION", "")
        if version:
            found.append(passed("NDPY_PROVIDER_VERSION", f"they are used as version {version} only"))
        for path in named:
            found += examine(path, examine_dll, pathlib.PureWindowsPath(path).name, path, _NO_ID, failed, version)
    return [*found, *examine_apart("adapters", __name__, "examine_adapters", adapter or "")]


def examine_process() -> Finding:
    """Examine what kind of DLL this process can load."""
    own = dll_header.own_machine()
    if own == "x86":
        return warned(
            "process",
            "this Python is an x86 program, which sees the catalogue of 32-bit programs only, where few drivers "
            "register",
            "use a 64-bit Python",
        )
    return passed("process", f"this Python is an {own} program, which can load {own} providers")


def examine_catalogue() -> Iterator[Finding]:
    """Examine every entry of the Winsock catalogue that is for NetworkDirect, or was meant to be."""
    try:
        entries = winsock_catalogue.entries()
    except ProviderNotFoundError as error:
        yield failed("catalogue", *split_remedy(str(error), "install ndpy again with pip"))
        return
    except ProviderError as error:
        yield failed("catalogue", str(error), "as an administrator: netsh winsock reset, then start the machine again")
        return
    usable = silent = 0
    for entry in entries:
        found = list(examine_entry(entry))
        served = [finding.verdict is Verdict.PASS for finding in found if finding.check.endswith(" addresses")]
        usable += any(served)
        silent += bool(served) and not any(served)
        yield from found
    if usable:
        yield passed("catalogue", f"{usable} of its {len(entries)} NetworkDirect entries can be used")
        return
    message = "the Winsock catalogue has no NetworkDirect entry"
    if entries:
        message = f"none of the catalogue's {len(entries)} NetworkDirect entries can be used, for the reasons above"
    verdict = warned if os.environ.get("NDPY_PROVIDER") else failed
    yield verdict("catalogue", message, winsock_catalogue.NO_ADDRESS_REMEDY if silent else _GET_ONE)


def examine_entry(entry: winsock_catalogue.Entry) -> Iterator[Finding]:
    """Examine one entry: its values, then its DLL."""
    label = entry.name or entry.guid
    if entry.problem:
        yield warned(label, f"{entry.problem} (entry {entry.guid}, {entry.path or 'no path'})", _DRIVER)
        return
    version = f"version {entry.version}, {' and '.join(entry.families)}"
    yield passed(label, f"entry {entry.guid} for {version}: {entry.path}")
    # The entry of a removed driver may be left over. Programs skip it, so an absent DLL is only a warning.
    yield from examine_dll(label, entry.path, entry.guid.strip("{}"), warned, str(entry.version))


def examine_dll(
    label: str, path: str, provider_id: str, absent: Callable[[str, str, str], Finding], version: str = ""
) -> Iterator[Finding]:
    """Examine a provider's DLL: whether it exists, fits this process, loads, and serves addresses.

    `version` is the only version that counts; "" means either.
    """
    if not os.path.exists(path):
        remedy = _ANOTHER if provider_id == _NO_ID else f"{_DRIVER}; or remove the entry, if the adapter has gone"
        yield absent(f"{label} DLL", f"{path} does not exist", remedy)
        return
    unfit = dll_header.bitness(path)
    if unfit:
        yield failed(
            f"{label} DLL", f"{path} cannot be loaded: {unfit}", f"use a Python that fits the DLL, or {_DRIVER}"
        )
        return
    arguments = (label, path, provider_id, version)
    yield from examine_apart(f"{label} DLL", __name__, "examine_provider", *arguments, limit_s=_LIMIT_S)


def examine_provider(label: str, path: str, provider_id: str, version: str = "") -> Iterator[Finding]:
    """Load a provider and ask for its addresses. examine_apart() calls this in another process."""
    from ndpy.platforms.networkdirect.adapter_info import adapters_of
    from ndpy.platforms.networkdirect.provider_dll import Provider

    repair = _ANOTHER if provider_id == _NO_ID else _DRIVER
    try:
        provider = Provider.use(path)
    except ProviderNotFoundError as error:
        yield failed(f"{label} DLL", str(error), repair)
        return
    yield passed(f"{label} DLL", f"{path} is there, built for {dll_header.machine(path)}, loads, and has both exports")
    try:
        used = provider.version(int(version) if version in ("1", "2") else None, provider_id)
        adapters = adapters_of(provider, used, provider_id)
    except UnsupportedError as error:
        other = provider_id == _NO_ID and (provider.serves(1, provider_id) or provider.serves(2, provider_id))
        yield failed(f"{label} version", str(error), _OTHER_VERSION if version and other else repair)
        return
    except ProviderError as error:
        yield failed(f"{label} version", str(error), repair)
        return
    both = (
        " and version 1, which NDPY_PROVIDER_VERSION=1 asks for"
        if used == 2 and provider.serves(1, provider_id)
        else ""
    )
    yield passed(f"{label} version", f"it serves NetworkDirect version {used}{both}")
    addresses = [address for _, served in adapters for address in served]
    if not addresses:
        yield warned(
            f"{label} addresses",
            "it serves no address, so no adapter can be opened",
            winsock_catalogue.NO_ADDRESS_REMEDY,
        )
        return
    yield passed(f"{label} addresses", f"{len(adapters)} adapter(s): {', '.join(addresses)}")
    yield from _examine_interfaces(label, addresses)


def _examine_interfaces(label: str, addresses: list[str]) -> Iterator[Finding]:
    """Examine whether the interfaces with a provider's addresses exist and are up."""
    check = f"{label} interfaces"
    states = {name: stats.isup for name, stats in interfaces.statistics().items()}
    own: dict[str, str] = {}
    for name, entries in interfaces.addresses().items():
        own.update((_plain(entry.address), name) for entry in entries)
    shown: dict[str, bool] = {}
    for address in addresses:
        interface = own.get(_plain(address))
        if interface is not None:
            shown[interface] = states.get(interface, True)
        elif not is_address(address) or reach(address) is not Reach.LOOPBACK:
            remedy = "see that the adapter is plugged in and enabled (Get-NetAdapter), then start the program again"
            yield warned(check, f"{address} is not an address of an interface that Windows shows", remedy)
    for interface, up in shown.items():
        if not up:
            yield warned(check, f"{interface} is down", f'plug in its cable, or: Enable-NetAdapter "{interface}"')
    rising = [interface for interface, up in shown.items() if up]
    if rising:
        yield passed(check, f"up: {', '.join(rising)}")


def _plain(address: str) -> str:
    """Return an address in one spelling, without its scope."""
    return str(plain_address(address)) if is_address(address) else address


def examine_adapters(adapter: str = "") -> Iterator[Finding]:
    """Examine the adapters that a program gets, or the one with this name or address.

    examine_apart() calls this in another process.
    """
    from ndpy.platforms.networkdirect.adapter_info import list_adapters, why_no_adapter

    try:
        infos = list_adapters()
    except (NdpyError, OSError) as error:
        yield failed("adapters", str(error), "see the findings above")
        return
    if not infos:
        message, _, remedy = why_no_adapter().partition(": ")
        yield failed("adapters", message, remedy.removesuffix("; `ndpy doctor` says more"))
        return
    if adapter:
        infos = [named for info in infos if (named := as_named(info, adapter))]
    for info in infos:
        version = f"NetworkDirect {getattr(info, 'version', 2)}"
        what = f"{version}, {info.netdev or 'no interface'}, MTU {info.mtu or 'unknown'}, {', '.join(info.addresses)}"
        if info.state == "active":
            yield passed(info.name, f"{info.state}, {what}")
        else:
            yield warned(info.name, f"{info.state}, {what}", "plug in its cable, and enable it (Enable-NetAdapter)")
    if infos and not any(info.state == "active" for info in infos):
        yield failed(
            "active adapter",
            f"{adapter or 'no adapter'} is{' not' if adapter else ''} active",
            "plug in a cable, and enable the adapter",
        )
