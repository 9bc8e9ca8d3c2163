"""Chooses the implementation for this system; lists and opens adapters."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

from ndpy.errors import AdapterNotFoundError, ProviderNotFoundError, from_errno, lacks_descriptor
from ndpy.objects.adapter import Adapter
from ndpy.objects.native_steps import Platform
from ndpy.objects.poller import Poller
from ndpy.vocabulary.info import AdapterInfo, as_named, is_address, port_number

#: More descriptors than a look for adapters has open at a time.
_TO_LOOK = 8


@functools.cache
def implementation() -> Platform:
    """Return the module with the public classes of this platform. The first call imports it."""
    if sys.platform == "linux":
        from ndpy.platforms.verbs import platform as linux

        return linux
    if sys.platform == "win32":
        from ndpy.platforms.networkdirect import platform as windows

        return windows
    raise ProviderNotFoundError(f"ndpy has no provider for {sys.platform}; it runs on Linux and Windows")


# `Poller()` needs the platform's class before there is an adapter.
Poller._implementation = staticmethod(lambda: implementation().Poller)


def list_adapters(*, provider: str | os.PathLike[str] | None = None, version: int | None = None) -> list[AdapterInfo]:
    """List the adapters of this machine in the system's order. The list is empty if there is none.

    An adapter that cannot be used is left out, unless all are unusable. `ndpy doctor` says why. soft0, the software
    adapter of this package on Linux, is left out too, unless NDPY_ADAPTER names it. Then it is the only one.

    Parameters:
        provider: the path of a NetworkDirect provider's DLL, to list its adapters only. Windows only. The default is
            the DLLs that NDPY_PROVIDER names or, without it, all providers of the system.
        version: 1 or 2, to list only adapters that are used through this version of NetworkDirect. Windows only. The
            default is NDPY_PROVIDER_VERSION or, without it, 2 where a provider or an address has both.
    Raises:
        ProviderNotFoundError: an RDMA library is missing, or the DLL cannot be loaded. The message names the package to
            install, or the DLL.
        UnsupportedError: `provider` or `version` was given on Linux, where libibverbs finds its providers itself.
    """
    return implementation().list_adapters(None if provider is None else os.fspath(provider), version)


def open_adapter(
    which: str | None = None, *, provider: str | os.PathLike[str] | None = None, version: int | None = None
) -> Adapter:
    """Open an adapter.

    Parameters:
        which: a name such as "rxe0", a name and a port such as "mlx5_0:2", a network interface such as "eth0.10" that
            leads to the adapter, or a local IP address that the adapter serves. The default is what the environment
            variable NDPY_ADAPTER names or, without it, the first adapter with an active port. All but the name alone
            also choose the port: it is the port of AdapterInfo.state, netdev and mtu, of Adapter.port_state, of
            local_endpoint() and of datagrams, and AdapterInfo.addresses are its addresses. On Linux "soft0" is the
            software adapter of this package, which is always there. It is never taken unless it is named.
        provider: see list_adapters().
        version: see list_adapters().
    Raises:
        AdapterNotFoundError: there is no such adapter. The message lists the adapters and gives the remedy.
        ProviderNotFoundError: see list_adapters().
        PermissionError: this user may not open the adapter.
    """
    if provider is None and version is None:
        info = find(which)
    else:
        adapters = list_adapters(provider=provider, version=version)
        if not adapters and provider is not None:
            raise AdapterNotFoundError(f"the provider {os.fspath(provider)} serves no address")
        info = choose(adapters, which or os.environ.get("NDPY_ADAPTER") or None)
    return implementation().open_adapter(info)


def find(which: str | None = None) -> AdapterInfo:
    """Describe the adapter that open_adapter(which) opens. Raises as that does."""
    if which is not None and not isinstance(which, str):
        raise TypeError(f"an adapter is named by a string, its name or a local IP address, not {which!r:.80}")
    which = which or os.environ.get("NDPY_ADAPTER") or None
    named = implementation().list_named(which)
    return choose(list_adapters() if named is None else named, which)


def unlisted(infos: list[AdapterInfo]) -> list[str]:
    """A sentence for each adapter that this machine has but that list_adapters(), which gave `infos`, lists only by
    name.
    """
    present = {info.name for info in infos}
    return [text for name, text in implementation().describe_unlisted().items() if name not in present]


@contextlib.contextmanager
def asking_for(which: str | None) -> Iterator[None]:
    """Let NDPY_ADAPTER name this adapter meanwhile, so that list_adapters() has it although it is listed only by
    name.
    """
    if which is None or sys.platform != "linux" or not implementation().is_listed_by_name_only(which):
        yield
        return
    former = os.environ.get("NDPY_ADAPTER")
    os.environ["NDPY_ADAPTER"] = which
    try:
        yield
    finally:
        if former is None:
            del os.environ["NDPY_ADAPTER"]
        else:
            os.environ["NDPY_ADAPTER"] = former


def choose(adapters: list[AdapterInfo], which: str | None) -> AdapterInfo:
    """Return the adapter that `which` names. Raises AdapterNotFoundError, or the reason why it cannot be used."""
    try:
        return _chosen(adapters, which)
    except AdapterNotFoundError:
        if number := lacks_descriptor(_TO_LOOK):
            raise from_errno("open adapter", number, f"{which or 'an adapter'} cannot be looked for") from None
        raise


def _chosen(adapters: list[AdapterInfo], which: str | None) -> AdapterInfo:
    if not adapters:
        wanted = f"no adapter {which!r}{_suggestion(which, adapters)}: " if which else ""
        raise AdapterNotFoundError(f"{wanted}this machine has no RDMA adapter; {implementation().why_no_adapter()}")
    if which is None:
        for info in adapters:
            if info.state == "active":
                return info
        raise AdapterNotFoundError(
            f"no adapter has an active port; there is {_present(adapters)}. Bring the link up (ip link set NETDEV "
            "up), or name the adapter to open it as it is"
        )
    # A name comes before an interface, which can have the same one.
    for info in sorted(adapters, key=lambda info: info.name != which):
        if named := as_named(info, which):
            return named
        if port_number(info, which) is not None:
            ports = ", ".join(f"{port.number} ({port.state})" for port in info.ports)
            raise AdapterNotFoundError(f"no port {which!r}; {info.name} has {ports or 'no ports'}")
    implementation().explain_absence(which)
    wanted = (
        f"no adapter serves the address {which}"
        if is_address(which)
        else f"no adapter {which!r}{_suggestion(which, adapters)}"
    )
    raise AdapterNotFoundError(f"{wanted}; there is {_present(adapters)}")


def _present(adapters: list[AdapterInfo]) -> str:
    """What can be named, in words."""
    return ", ".join(
        f"{info.name} ({_ports_of(info)}; {', '.join(info.addresses) or 'no address'})" for info in adapters
    )


def _ports_of(info: AdapterInfo) -> str:
    """The ports of an adapter in words, with their states and network interfaces."""
    said = []
    for port in info.ports:
        names = ", ".join(interface.name for interface in port.interfaces)
        words = f"port {port.number} {port.state}" if len(info.ports) > 1 else info.state
        said.append(f"{words} at {names}" if names else words)
    return "; ".join(said) or info.state


def _suggestion(which: str, adapters: list[AdapterInfo]) -> str:
    """The name that was meant perhaps, in brackets, or ""."""
    import difflib

    names = [info.name for info in adapters]
    names += [interface.name for info in adapters for port in info.ports for interface in port.interfaces]
    names += implementation().describe_unlisted()
    plain = {name.lower(): name for name in names}
    close = difflib.get_close_matches(which.lower(), plain, 1)
    return f" (did you mean {plain[close[0]]}?)" if close else ""
