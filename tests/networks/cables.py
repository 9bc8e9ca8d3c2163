"""Adapters of the kernel at both ends of a cable, in the VM.

Both ends are in one network namespace, because an adapter in software receives nothing in any other one. A packet goes
by the cable because the source address is bound to the interface of the adapter that it is from.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, End, Keeper, Pair, create_end, wait_until

import ndpy

KINDS = {"rdma_rxe": "rxe", "siw": "siw"}

# The first connection of a process takes up to 10 s on siw in an emulated machine.
CONNECT_S = 3 * DEADLINE_S


def _run(*words: str, text: str | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, input=text, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(words)}: {text or ''}{done.stderr.strip()}")
    return done.stdout


def ip(*commands: str) -> None:
    """Run these commands of ip."""
    _run("ip", "-batch", "-", text="\n".join(commands) + "\n")


def kind_under_test(name: str) -> str:
    """The kind of the adapter under test, of which there can be more. Skips where there can be none."""
    if os.geteuid() or not Path("/dev/virtio-ports/ndpy.control").exists():
        pytest.skip("adds network interfaces: only inside the VM of `ndpy vm run`")
    driver = next(info.driver for info in ndpy.list_adapters() if info.name == name)
    if driver not in KINDS:
        pytest.skip(f"{driver} makes no further adapters")
    return KINDS[driver]


def sent(netdev: str) -> int:
    """How many packets have left by an interface."""
    return int(Path(f"/sys/class/net/{netdev}/statistics/tx_packets").read_text())


def _take_packets_of_own_addresses(netdev: str) -> None:
    for name, value in (("accept_local", "1"), ("rp_filter", "0")):
        Path(f"/proc/sys/net/ipv4/conf/{netdev}/{name}").write_text(value)


def _remove(name: str) -> None:
    """Remove an adapter. librdmacm keeps it open after its last use, until it looks which adapters there are."""
    deleting = subprocess.Popen(["rdma", "link", "delete", name])
    library = ctypes.CDLL("librdmacm.so.1")
    library.rdma_get_devices.restype = ctypes.c_void_p

    def gone() -> bool:
        library.rdma_free_devices(ctypes.c_void_p(library.rdma_get_devices(None)))
        return deleting.poll() is not None

    wait_until(gone, f"{name} is removed")


class Cables:
    """Cables, what lies on them, and adapters. Everything is removed at the end."""

    def __init__(self, kind: str, stack: contextlib.ExitStack) -> None:
        self._kind = kind
        self._stack = stack

    def lay(self, near: str, far: str) -> None:
        """A cable between two new interfaces. It is down."""
        ends = ("name", near, "mtu", "4200"), ("peer", "name", far, "mtu", "4200")
        _run("ip", "link", "add", *ends[0], "type", "veth", *ends[1])
        self._stack.callback(ip, f"link delete {near}")

    def add(self, name: str, *words: str) -> None:
        """One more interface. Skips the test if the kernel has none of this kind."""
        try:
            _run("ip", "link", "add", "name", name, *words)
        except OSError as error:
            pytest.skip(f"the kernel of the VM makes no such interface: {error}")
        self._stack.callback(_run, "sh", "-c", f"ip link delete {name} 2>/dev/null || true")

    def up(self, netdev: str, *addresses: str) -> None:
        ip(
            f"link set {netdev} up",
            *(f"address add {address} dev {netdev}{' nodad' * (':' in address)}" for address in addresses),
        )
        _take_packets_of_own_addresses(netdev)

    def switch(self, name: str, ports: Sequence[str]) -> None:
        """A switch with these cables at its ports. The near ends are down."""
        self.add(name, "mtu", "4200", "type", "bridge")
        ip(f"link set {name} up")
        for port in ports:
            self.lay(port, f"{port}-far")
            ip(f"link set {port}-far master {name} up")
            # Of the interfaces in the switch's network, only that with the address answers who has it.
            Path(f"/proc/sys/net/ipv4/conf/{port}/arp_ignore").write_text("1")

    def adapter(self, netdev: str) -> str:
        """A new adapter on an interface. Returns its name."""
        name = f"{self._kind}_{netdev}"
        _run("rdma", "link", "add", name, "type", self._kind, "netdev", netdev)
        self._stack.callback(_remove, name)
        return name


def wait_for_addresses(**wanted: Sequence[str]) -> dict[str, ndpy.AdapterInfo]:
    """Wait until these adapters have these addresses. Returns all adapters, by name."""

    def there() -> dict[str, ndpy.AdapterInfo] | None:
        found = {info.name: info for info in ndpy.list_adapters()}
        complete = all(
            name in found and found[name].state == "active" and set(addresses) <= set(found[name].addresses)
            for name, addresses in wanted.items()
        )
        return found if complete else None

    return wait_until(there, f"the adapters have these addresses: {wanted}")


@dataclass
class Connection:
    """What both sides say of a connection."""

    pair: Pair
    source: str
    seen_from: str


def connect(
    keep: Keeper, near: ndpy.Adapter, far: ndpy.Adapter, host: str, listener: ndpy.Listener | None = None
) -> Connection:
    """Connect the adapter `near` to this address of `far`, or to what listens at it. The routes decide where from."""
    client, server = create_end(keep, near), create_end(keep, far)
    listener = listener or keep(far.listen((host, 0)))
    connector = keep(near.create_connector())
    connecting = connector.begin_connect(client.queue_pair, (host, listener.address[1]))
    request = keep(listener.get_request(CONNECT_S))
    accepting = request.begin_accept(server.queue_pair)
    connecting.result(CONNECT_S)
    connector.complete_connect(CONNECT_S)
    accepting.result(CONNECT_S)
    assert connector.peer_address[0] == request.local_address[0] == host
    client, server = (End(end.queue_pair, end.cq, own) for end, own in ((client, connector), (server, request)))
    return Connection(Pair(near, client, server), connector.local_address[0], request.peer_address[0])
