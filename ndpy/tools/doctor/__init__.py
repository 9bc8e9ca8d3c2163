"""What is right and wrong with RDMA on this machine."""

from __future__ import annotations

import sys

from ndpy.errors import AdapterNotFoundError, ProviderNotFoundError, UnsupportedError
from ndpy.tools.doctor.findings import Finding, failed, split_remedy
from ndpy.tools.doctor.link import LinkDescription, plain_description
from ndpy.vocabulary.info import AdapterInfo, port_in_use

__all__ = ["Finding", "LinkDescription", "describe_link", "diagnose", "record"]

_INSTALL_AGAIN = "install ndpy again with pip"


def diagnose(adapter: str | None = None) -> list[Finding]:
    """Examine this machine. Never raises for anything that is broken.

    adapter: as for open_adapter(), to leave out other adapters and, if it chooses one, other ports. If there is none of
        that name, nothing says so.
    """
    try:
        if sys.platform == "linux":
            from ndpy.tools.doctor import linux

            return linux.diagnose(adapter)
        if sys.platform == "win32":
            from ndpy.tools.doctor import windows

            return windows.diagnose(adapter)
    except ImportError as error:
        return [failed("ndpy", f"a module of ndpy, or one that ndpy needs, is missing: {error}", _INSTALL_AGAIN)]
    except ProviderNotFoundError as error:
        return [failed("ndpy", *split_remedy(str(error), _INSTALL_AGAIN))]
    return [failed("ndpy", f"ndpy has no provider for {sys.platform}", "use Linux or Windows")]


def describe_link(adapter: str | AdapterInfo, gid_index: int | None = None) -> LinkDescription:
    """Describe the link of an adapter of this machine. Settings that the system does not tell are None.

    Parameters:
        adapter: the adapter's name, or what the adapter says about itself.
        gid_index: the GID in use, such as QueuePair.path says. None for the one that local_endpoint() chooses.
    Raises:
        AdapterNotFoundError: there is no adapter of that name.
        NdpyError: it cannot be opened.
    """
    if sys.platform == "linux":
        from ndpy.tools.doctor import linux_link

        return linux_link.read_link(linux_link.look_up(adapter) if isinstance(adapter, str) else adapter, gid_index)
    if isinstance(adapter, str):
        from ndpy.platforms.networkdirect.platform import list_adapters

        found = [info for info in list_adapters() if info.name == adapter]
        if not found:
            raise AdapterNotFoundError(f"there is no adapter {adapter!r}")
        adapter = found[0]
    return plain_description(adapter, port_in_use(adapter), None)


def record() -> str:
    """Describe this machine for the collection in tests/machines of ndpy's source. Personal data is replaced.

    Returns: the text of such a file.
    Raises:
        UnsupportedError: on Windows.
        ProviderNotFoundError: ndpy's own modules are missing.
    """
    if sys.platform != "linux":
        raise UnsupportedError("only machines with Linux can be recorded", operation="record")
    from ndpy.tools.doctor import recording

    return recording.record()
