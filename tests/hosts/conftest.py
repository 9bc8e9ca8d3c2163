"""Two hosts: this one, and the one that --peer names.
Each test leaves the network and both kernels as it found them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator

import pytest
from hosts import commands
from kit.helpers import kernel_resources
from kit.remote import Host

from ndpy.tools.machines.hosts import MTU

NETDEV = "wire0"


@pytest.fixture(scope="session", autouse=True)
def _two_hosts(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--peer") is None:
        pytest.skip("with --peer only: `make test-hosts` starts two hosts")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The other host dies in test_death.py, so its tests come last."""
    items.sort(key=lambda item: item.path.name == "test_death.py")


class Network:
    """What this host and the other one do to the frames that they send."""

    def __init__(self, other: Host) -> None:
        self._other = other

    def run_here(self, *words: object) -> str:
        return commands.run([str(word) for word in words])

    def run_there(self, *words: object) -> str:
        text: str = self._other.call("hosts.commands:run", [str(word) for word in words])
        return text

    def run(self, *words: object) -> None:
        """Run a command on both hosts."""
        self.run_here(*words)
        self.run_there(*words)

    @contextlib.contextmanager
    def disturbed(self, *netem: object) -> Iterator[None]:
        """Both hosts' frames pass tc-netem with these words."""
        self.run("tc", "qdisc", "replace", "dev", NETDEV, "root", "netem", "limit", 10000, *netem)
        try:
            yield
        finally:
            self.heal()

    @contextlib.contextmanager
    def mute(self) -> Iterator[None]:
        """The other host hears everything, and all its frames get lost."""
        self.run_there("tc", "qdisc", "replace", "dev", NETDEV, "root", "netem", "loss", "100%")
        try:
            yield
        finally:
            self.heal()

    @contextlib.contextmanager
    def narrow(self, mtu: int) -> Iterator[None]:
        """Frames of more than `mtu` bytes get lost between the hosts, as behind a switch with a smaller MTU."""
        police = ("police", "rate", "10gbit", "burst", "10mb", "mtu", mtu + 14, "conform-exceed", "drop/continue")
        self.run("tc", "qdisc", "add", "dev", NETDEV, "clsact")
        try:
            self.run("tc", "filter", "add", "dev", NETDEV, "ingress", "matchall", "action", *police)
            yield
        finally:
            self.run("tc", "qdisc", "del", "dev", NETDEV, "clsact")
            self.heal()

    def heal(self) -> None:
        for run in (self.run_here, self.run_there):
            with contextlib.suppress(AssertionError):  # there may be no such discipline
                run("tc", "qdisc", "del", "dev", NETDEV, "root")
            run("ip", "link", "set", NETDEV, "mtu", MTU, "up")


@pytest.fixture
def network(peer_host: Host) -> Iterator[Network]:
    network = Network(peer_host)
    network.run_here("modprobe", "sch_netem")
    network.run_there("modprobe", "sch_netem")
    yield network
    network.heal()


@pytest.fixture
def local_address() -> str:
    return os.environ["NDPY_ADDRESS"]


@pytest.fixture
def peer_address() -> str:
    return os.environ["NDPY_PEER_ADDRESS"]


def settles(count: Callable[[], object], wanted: object, limit_s: float = 20) -> object:
    """The last value of count(), which should become `wanted` soon."""
    deadline = time.monotonic() + limit_s
    while (value := count()) != wanted and time.monotonic() < deadline:
        time.sleep(0.2)
    return value


@pytest.fixture
def nothing_leaks(peer_host: Host) -> Iterator[None]:
    """Both processes have as many objects of the kernel afterwards as before."""
    before = kernel_resources(), peer_host.call("kit.helpers:kernel_resources")
    yield
    assert settles(kernel_resources, before[0]) == before[0]
    assert settles(lambda: peer_host.call("kit.helpers:kernel_resources"), before[1]) == before[1]


@pytest.fixture
def server(nothing_leaks, peer_host: Host, adapter_name: str, peer_address: str):
    """A traffic.Server on the other host. The test fails if it saw a wrong byte."""
    server = peer_host.call("hosts.traffic:Server", adapter_name, peer_address)
    yield server
    server.close()
    assert list(server.errors) == []
