"""`--serve`: being the other side of a command, for one client after the other."""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
from collections.abc import Callable
from typing import Any

import click

import ndpy
from ndpy.addresses import numeric_host
from ndpy.cli.channel import WAKE_S, Arguments, BadRequest, connect_with_secret
from ndpy.cli.peers import nearest_first, parse_address
from ndpy.cli.sources import open_from

#: Serves one client, whose control connection this is, until it leaves. Returns how it ended.
ServeClient = Callable[[ndpy.Adapter, socket.socket], str]


def answer_hello(
    command: str, protocol: int, adapter: ndpy.Adapter, arguments: Arguments, control: str | None
) -> dict[str, Any]:
    """The answer to a client's first command. Raises BadRequest if it speaks another version of the command's protocol."""
    theirs = arguments.integer("protocol", 0, 1 << 16)
    arguments.finish()
    if theirs != protocol:
        raise BadRequest(
            f"this side speaks version {protocol} of the protocol of `ndpy {command}` (ndpy {ndpy.__version__}), the other side "
            f"version {theirs}. Install the same ndpy on both machines"
        )
    info = adapter.info
    return {
        "version": ndpy.__version__,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "adapter": info.name,
        "provider": info.provider,
        "driver": info.driver,
        "transport": info.transport,
        "addresses": nearest_first(info.addresses, control),
    }


def serve(
    command: str,
    default_port: int,
    serve_client: ServeClient,
    which: str | None,
    listen_at: str | None,
    client: int | None,
    source: str | None = None,
    gid: str | None = None,
) -> int:
    """Serve clients one at a time, until Ctrl-C. Returns the exit status.

    client: the port of a SecretListener of this machine. Then only the process at that port is served.
    """

    def say(text: str) -> None:
        click.echo(f"{command}: {text}")
        sys.stdout.flush()

    try:
        with contextlib.ExitStack() as stack:
            adapter = stack.enter_context(open_from(which, source, gid)[0])
            if client:
                serve_client(adapter, stack.enter_context(connect_with_secret(client, sys.stdin.buffer)))
                return 0
            addresses = adapter.info.addresses
            try:
                host, port = parse_address(listen_at or "", default_port, addresses[0] if addresses else "")
            except ValueError as error:
                raise click.UsageError(f"--listen: {error}") from None
            if not host:
                raise click.UsageError(f"{adapter.info.name} has no IP address. Choose one with --listen HOST")
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.create_server(address, family=family, backlog=4))
            host, port = numeric_host(listener.getsockname()), listener.getsockname()[1]
            shown = f"[{host}]" if ":" in host else host
            say(f"serving {adapter.info.name} ({adapter.info.provider}) at {shown}:{port}. Press Ctrl-C to stop")
            _serve_all(adapter, listener, serve_client, say)
    except KeyboardInterrupt:
        say("stopped")
        return 0
    except (ndpy.NdpyError, OSError) as error:
        click.echo(f"{command}: {type(error).__name__}: {error}", err=True)
        return 1
    return 0


def _serve_all(
    adapter: ndpy.Adapter, listener: socket.socket, serve_client: ServeClient, say: Callable[[str], None]
) -> None:
    listener.settimeout(WAKE_S)
    while True:
        try:
            connection, address = listener.accept()
        except TimeoutError:
            continue
        say(f"client {address[0]}")
        try:
            ended = serve_client(adapter, connection)
        except Exception as error:
            # Whatever one client causes, the next one is served.
            ended = f"dropped: {type(error).__name__}: {error}"
        say(f"client {address[0]} {ended}")
