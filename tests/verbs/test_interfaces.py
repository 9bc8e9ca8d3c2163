"""VLANs and macvlans on the interface of an adapter, for real: their addresses connect, each from its own GID."""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, ask, create_end, establish, send_message, wait_until

import ndpy
from ndpy import platforms

VLAN, MACVLAN = "203.0.113.10", "203.0.113.130"


def run(*command: str, check: bool = True) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, check=check, timeout=DEADLINE_S, capture_output=True)


@pytest.fixture
def on_top(adapter_name):
    """A VLAN and a macvlan on the adapter's interface: the names of the three, and the adapter's port."""
    if os.geteuid() or not Path("/dev/virtio-ports/ndpy.control").exists():
        pytest.skip("adds network interfaces: only inside the VM of `ndpy vm run`")
    info = next(info for info in ndpy.list_adapters() if info.name == adapter_name)
    if info.transport != "RoCE":
        pytest.skip("iWARP has no GIDs")
    lower = info.netdev
    vlan, macvlan = f"{lower}.77", "ndpymv0"
    with contextlib.ExitStack() as stack:
        for name, address, words in (
            (vlan, VLAN, ("type", "vlan", "id", "77")),
            (macvlan, MACVLAN, ("type", "macvlan", "mode", "bridge")),
        ):
            added = run("ip", "link", "add", "link", lower, "name", name, *words, check=False)
            if added.returncode:
                pytest.skip(f"the kernel has no {words[1]}: {added.stderr.decode().strip()}")
            stack.callback(run, "ip", "link", "delete", name, check=False)
            run("ip", "address", "add", f"{address}/25", "dev", name)
            run("ip", "link", "set", name, "up")
        wait_until(
            lambda: {VLAN, MACVLAN} <= set(platforms.find(adapter_name).addresses), "the adapter has the addresses"
        )
        yield lower, vlan, macvlan


def test_a_vlan_and_a_macvlan_lead_to_the_adapter(adapter_name, on_top):
    lower, vlan, macvlan = on_top
    port = platforms.find(adapter_name).ports[0]
    found = {entry.name: (entry.parent, entry.vlan) for entry in port.interfaces}
    assert (found[vlan], found[macvlan]) == ((lower, 77), (lower, None))
    told = {gid.address: (gid.netdev, gid.vlan) for gid in port.gids}
    assert (told[VLAN], told[MACVLAN]) == ((vlan, 77), (macvlan, None))


@pytest.mark.parametrize("which", [0, 1], ids=["vlan", "macvlan"])
@pytest.mark.parametrize("by", ["interface", "address"])
def test_connections_use_the_gid_of_what_the_adapter_was_opened_by(keep, adapter_name, on_top, which, by):
    address, netdev = (VLAN, MACVLAN)[which], on_top[1:][which]
    adapter = keep(ndpy.open_adapter(address if by == "address" else netdev))
    assert (adapter.info.name, adapter.info.netdev, adapter.info.addresses[0]) == (adapter_name, netdev, address)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    (gid,) = [gid for gid in adapter.info.ports[0].gids if gid.address == address]
    assert client.queue_pair.local_endpoint().gid_index == gid.index
    offer = ask(keep, adapter, client.queue_pair, listener=keep(adapter.listen((address, 0))))
    establish(offer, server.queue_pair)
    assert offer.client.local_address[0] == address
    assert client.queue_pair.path.local_gid == server.queue_pair.path.local_gid == gid
    send_message(keep, client, server, b"through it")
