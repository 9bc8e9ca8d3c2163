"""What an end says about its link and its connection. Both sides of a smoke test use it."""

from __future__ import annotations

import contextlib

import ndpy
from ndpy.tools.cli.smoke.resources import ConnectionEnd
from ndpy.tools.cli.smoke.views import View, plain
from ndpy.tools.doctor import LinkDescription, describe_link
from ndpy.vocabulary.info import as_named


def describe_own(info: ndpy.AdapterInfo, queue_pair: ndpy.QueuePair | None) -> LinkDescription:
    """Describe this end's link, with the GID that the queue pair uses. The MTU may have changed since the adapter was
    opened.
    """
    path = None
    if queue_pair is not None:
        with contextlib.suppress(ndpy.NdpyError):
            path = queue_pair.path
    with contextlib.suppress(ndpy.NdpyError, OSError):
        info = next((now for now in ndpy.list_adapters() if now.name == info.name), info)
    # A connection may use another port than the one that was asked for.
    port = path.port if path is not None else info.port
    info = as_named(info, f"{info.name}:{port}") or info
    return describe_link(info, path.local_gid.index if path is not None and path.local_gid is not None else None)


def view_of(info: ndpy.AdapterInfo, end: ConnectionEnd, control: tuple[str | None, str | None]) -> View:
    """What this end sees of its connection. control: the own and the other address of the control connection."""
    assert end.connector is not None
    path = end.queue_pair.path
    gid = path.local_gid if path is not None else None
    return View(
        own=plain(end.connector.local_address[0]),
        other=plain(end.connector.peer_address[0]),
        own_gid=plain(gid.value) if gid is not None else None,
        other_gid=plain(path.remote_gid) if path is not None else None,
        control_own=plain(control[0]),
        control_other=plain(control[1]),
        addresses=info.addresses,
    )
