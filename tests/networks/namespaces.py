"""Hosts in network namespaces of their own, with cables between them.

    with Network() as network:
        a, b = network.host("a"), network.host("b")
        network.cable(a, "eth0", b, "eth0")
        a.ip("address add 192.0.2.1/24 dev eth0")
        b.ip("address add 192.0.2.2/24 dev eth0")
        a.run("ping", "-c1", "192.0.2.2")

This needs root. It touches nothing of the machine's own network.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kit import remote
from kit.processes import Process

TESTS = Path(__file__).resolve().parent.parent
LIMIT_S = 60
_CONTROL_PORT = 9
_numbers = itertools.count(1)


def _run(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S, input=text, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {text or ''}{done.stderr.strip()}")
    return done.stdout


def _enter(namespace: int) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


@contextlib.contextmanager
def _inside(namespace: str) -> Iterator[None]:
    """The sockets that this thread makes meanwhile are in the namespace."""
    with open("/proc/thread-self/ns/net") as own, open(f"/run/netns/{namespace}") as other:
        _enter(other.fileno())
        try:
            yield
        finally:
            _enter(own.fileno())


@functools.cache
def why_impossible() -> str:
    """Why there can be no namespaces with cables here, "" if there can be."""
    try:
        with Network() as network:
            network.cable(network.host("one"), "eth0", network.host("other"), "eth0")
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return ""


class Host:
    def __init__(self, stack: contextlib.ExitStack, name: str) -> None:
        self.namespace = f"ndpy-{os.getpid()}-{next(_numbers)}-{name}"
        self._stack = stack
        self._there: remote.Host | None = None
        #: Programs that are started later have this file as /etc/hosts.
        self.hosts_file: Path | None = None
        _run("ip", "netns", "add", self.namespace)
        stack.callback(_run, "ip", "netns", "delete", self.namespace)
        # An IPv6 address can be used at once.
        self.set("net/ipv6/conf/default/accept_dad", 0)
        self.ip("link set lo up")

    def ip(self, *commands: str) -> None:
        """Run these commands of ip."""
        _run("ip", "-n", self.namespace, "-batch", "-", text="\n".join(commands) + "\n")

    def run(self, *words: str) -> str:
        return _run("ip", "netns", "exec", self.namespace, *words)

    def set(self, name: str, value: object) -> None:
        """Set a variable of /proc/sys."""
        self.run("sh", "-c", f"echo {value} >/proc/sys/{name}")

    def forward(self) -> None:
        """Be a router."""
        self.set("net/ipv4/ip_forward", 1)
        self.set("net/ipv6/conf/all/forwarding", 1)

    def start(self, *words: str | Path) -> Process:
        """A program there."""
        if self.hosts_file is not None:
            words = ("sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', self.hosts_file, *words)
        return self._stack.enter_context(Process("ip", "netns", "exec", self.namespace, *words))

    def ndpy(self, *words: str) -> Process:
        return self.start(sys.executable, "-m", "ndpy", *words)

    def call(self, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a function of a module of tests/ in a process there. See remote.Host.call()."""
        if self._there is None:
            server = self.start(sys.executable, TESTS / "kit/remote.py", "--listen", f"127.0.0.1:{_CONTROL_PORT}")
            server.wait_for("listening on")
            with _inside(self.namespace):
                self._there = self._stack.enter_context(remote.connect(("127.0.0.1", _CONTROL_PORT), LIMIT_S))
                # The connection of this thread is made with its first call.
                self._there.call("os:getpid")
        return self._there.call(function, *arguments, **options)


class Network:
    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, name: str) -> Host:
        return Host(self._stack, name)

    def behind_a_router(
        self, near: str, gateway: str, far_gateway: str, far: str, *, near_length: int, far_length: int
    ) -> tuple[Host, Host, Host]:
        """Two hosts and the router between them, with these addresses and lengths of their networks' prefixes."""
        hosts = one, router, other = self.host("near"), self.host("router"), self.host("far")
        self.cable(one, "eth0", router, "eth0")
        self.cable(router, "eth1", other, "eth0")
        router.ip(f"address add {gateway}/{near_length} dev eth0", f"address add {far_gateway}/{far_length} dev eth1")
        router.forward()
        one.ip(f"address add {near}/{near_length} dev eth0", f"route add default via {gateway}")
        other.ip(f"address add {far}/{far_length} dev eth0", f"route add default via {far_gateway}")
        return hosts

    def two_links(self) -> tuple[Host, Host]:
        """Two hosts with two cables between them. Both interfaces of a host have the same link-local address."""
        near, far = self.host("near"), self.host("far")
        for name in ("eth0", "eth1"):
            self.cable(near, name, far, name)
            near.ip(f"address flush dev {name}", f"address add fe80::1/64 dev {name}")
            far.ip(f"address flush dev {name}", f"address add fe80::2/64 dev {name}")
        return near, far

    def cable(self, one: Host, first: str, other: Host, second: str) -> None:
        """Connect two interfaces and set them up."""
        ends = [("name", first, "netns", one.namespace), ("peer", "name", second, "netns", other.namespace)]
        _run("ip", "link", "add", *ends[0], "type", "veth", *ends[1])
        for host, name in ((one, first), (other, second)):
            host.ip(f"link set {name} up")
