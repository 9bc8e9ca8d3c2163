"""`--serve`: being the other side of a command, for one client after the other."""

from __future__ import annotations

import abc
import contextlib
import errno
import faulthandler
import platform
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import click

import ndpy
from ndpy.tools.cli.channel import (
    WAKE_S,
    Arguments,
    BadRequest,
    Channel,
    ChannelClosed,
    ChannelError,
    connect_with_secret,
)
from ndpy.tools.cli.numbers import Number
from ndpy.tools.cli.peers import nearest_first, parse_address
from ndpy.tools.cli.sources import open_from
from ndpy.vocabulary.addresses import is_wildcard, listening_addresses, numeric_host, plain_address

#: Serves one client, whose control connection this is, until it leaves. Returns how it ended.
ServeClient = Callable[[ndpy.Adapter, socket.socket], str]
F = TypeVar("F", bound=Callable[..., Any])
Answer = dict[str, Any]
SEND_LIMIT_S = 30.0
HELLO_LIMIT_S = 10.0
_TRIES = 16
# One of several addresses may not be usable yet, or may have gone, or its family is switched off.
_UNUSABLE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def two_sided_options(default_port: int, timeout: str, serving: str) -> Callable[[F], F]:
    """Give a command --timeout, --serve, --listen and --client, as `timeout_s`, `serving`, `listen_at` and `client`.

    Parameters:
        timeout, serving: the help of --timeout and of --serve.
    """
    options = (
        click.option(
            "--timeout",
            "timeout_s",
            type=Number(1, 3600),
            default=30.0,
            show_default=True,
            metavar="SECONDS",
            help=timeout,
        ),
        click.option("--serve", "serving", is_flag=True, help=serving),
        click.option(
            "--listen",
            "listen_at",
            metavar="[HOST][:PORT]",
            help=f"Where --serve listens. Default: port {default_port} of all the adapter's addresses.",
        ),
        click.option(
            "--client",
            type=click.IntRange(1, 65535),
            hidden=True,
            help=(
                "With --serve: serve one client only. It listens at this port of this machine; its secret is on "
                "standard input."
            ),
        ),
    )

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def _terminated(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def begin() -> None:
    """Show where a crash happens, and end as after Ctrl-C when the system asks for it."""
    with contextlib.suppress(OSError):
        # Some callers replace standard error by an object without a file descriptor.
        faulthandler.enable()
    signal.signal(signal.SIGTERM, _terminated)


class Session(abc.ABC):
    """One client, and what it can make this process do: the commands in the table of a derived class, no others."""

    #: The command, and the version of its protocol.
    name: str
    protocol: int
    #: A client that is dropped for one of these is told so.
    told: tuple[type[Exception], ...] = (BadRequest,)
    #: What refuses a request. The client gets the name and the text.
    refusals: tuple[type[Exception], ...] = (ndpy.NdpyError, OSError)

    def __init__(self, adapter: ndpy.Adapter, control: tuple[str | None, str | None]) -> None:
        """control: the addresses of this end and of the client's end of the control connection."""
        self._adapter = adapter
        self._control = control
        self._commands: dict[str, Callable[[Arguments], Answer | None]] = {"hello": self._hello}

    @property
    @abc.abstractmethod
    def limit_s(self) -> float:
        """How long the client may be silent."""

    @abc.abstractmethod
    def close(self) -> object:
        """Close everything that the client created."""

    def why(self, error: Exception) -> str:
        """The text of a refusal."""
        return str(error)

    def answer(self, request: Answer) -> Answer | None:
        """Carry out a request and return the answer, which may be a refusal. None if it needs none.
        Raises BadRequest.
        """
        arguments = Arguments(request)
        name = arguments.text("command", 32)
        command = self._commands.get(name)
        if command is None:
            raise BadRequest(f"there is no command {name!r}")
        try:
            return command(arguments)
        except self.refusals as error:
            return {"error": type(error).__name__, "text": self.why(error)}

    def _hello(self, arguments: Arguments) -> Answer:
        """The answer to a client's first command. Raises BadRequest if it speaks another version of the protocol."""
        theirs = arguments.integer("protocol", 0, 1 << 16)
        arguments.finish()
        if theirs != self.protocol:
            raise BadRequest(
                f"this side speaks version {self.protocol} of the protocol of `ndpy {self.name}` (ndpy "
                f"{ndpy.__version__}), the other side version {theirs}. Install the same ndpy on both machines"
            )
        info = self._adapter.info
        return {
            "version": ndpy.__version__,
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()}",
            "adapter": info.name,
            "provider": info.provider,
            "driver": info.driver,
            "transport": info.transport,
            "addresses": nearest_first(info.addresses, self._control[0]),
        }

    def serve(self, channel: Channel) -> str:
        """Serve the client until it leaves. Returns how it ended."""
        try:
            while True:
                answer = self.answer(channel.receive(self.limit_s))
                if answer is not None:
                    channel.send(answer, SEND_LIMIT_S)
        except ChannelClosed:
            return "left"
        except (BadRequest, ChannelError) as error:
            with contextlib.suppress(ChannelError):
                if isinstance(error, self.told):
                    channel.send({"error": type(error).__name__, "text": str(error)}, 1.0)
            return f"dropped: {error}"
        finally:
            self.close()
            channel.close()


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
                host, port = parse_address(listen_at or "", default_port)
            except ValueError as error:
                raise click.UsageError(f"--listen: {error}") from None
            if not host and not addresses:
                raise click.UsageError(f"{adapter.info.name} has no IP address. Choose one with --listen HOST")
            listeners = _listen_at(_places(addresses, host), port)
            for listener in listeners:
                stack.enter_context(listener)
            at = ", ".join(_reached_at(listeners, addresses))
            say(f"serving {adapter.info.name} ({adapter.info.provider}) at {at}. Press Ctrl-C to stop")
            _serve_all(adapter, listeners, serve_client, say)
    except KeyboardInterrupt:
        say("stopped")
        return 0
    except (ndpy.NdpyError, OSError) as error:
        click.echo(f"{command}: {type(error).__name__}: {error}", err=True)
        return 1
    return 0


def _places(addresses: Sequence[str], host: str) -> list[str]:
    """The hosts to listen at. Without a host, clients come at every address of the adapter, as to its listen(("",
    port)).
    """
    if host:
        return [host]
    hosts = [place for place, _ in listening_addresses(addresses, ("", 0))]
    if not is_wildcard(hosts[0]):
        return hosts
    # A client of IPv4 has its own address only on a socket of IPv4.
    versions = {plain_address(address).version for address in addresses}
    return [wildcard for version, wildcard in ((4, "0.0.0.0"), (6, "::")) if version in versions]


def _listen_at(hosts: Sequence[str], port: int) -> list[socket.socket]:
    """Listen at all of these hosts, at one port."""
    for _ in range(_TRIES):
        try:
            return _listen_once(hosts, port)
        except OSError as error:
            # A free port of the first address may be taken at the next.
            if port or len(hosts) == 1 or error.errno != errno.EADDRINUSE:
                raise
    return _listen_once(hosts, port)


def _listen_once(hosts: Sequence[str], port: int) -> list[socket.socket]:
    listeners: list[socket.socket] = []
    with contextlib.ExitStack() as unfinished:
        for host in hosts:
            number = listeners[0].getsockname()[1] if listeners else port
            try:
                family, _, _, _, address = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM)[0]
                listener = socket.create_server(address, family=family, backlog=4)
            except OSError as error:
                if error.errno in _UNUSABLE and (listeners or host != hosts[-1]):
                    continue
                raise
            listeners.append(unfinished.enter_context(listener))
        unfinished.pop_all()
    return listeners


def _reached_at(listeners: Sequence[socket.socket], addresses: Sequence[str]) -> Iterator[str]:
    """What clients give to --peer."""
    for listener in listeners:
        host, port = numeric_host(listener.getsockname()), listener.getsockname()[1]
        own = [address for address in addresses if (":" in address) == (":" in host)]
        for shown in own if is_wildcard(host) else [host]:
            yield f"[{shown}]:{port}" if ":" in shown else f"{shown}:{port}"


def _serve_all(
    adapter: ndpy.Adapter,
    listeners: Sequence[socket.socket],
    serve_client: ServeClient,
    say: Callable[[str], None],
) -> None:
    for listener in listeners:
        listener.setblocking(False)
    while True:
        for listener in select.select(listeners, [], [], WAKE_S)[0]:
            try:
                connection, address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                # The client has gone.
                continue
            # Winsock gives it the listener's mode.
            connection.setblocking(True)
            say(f"client {address[0]}")
            try:
                ended = serve_client(adapter, connection)
            except Exception as error:
                # Whatever one client causes, the next one is served.
                ended = f"dropped: {type(error).__name__}: {error}"
            say(f"client {address[0]} {ended}")
