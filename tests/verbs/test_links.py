"""A port that goes down and up, and a device that is removed, on a link made for this purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, wait_until
from kit.processes import Process

import ndpy

NETDEV = "ndpyt0"
ADDRESS = "203.0.113.1"
TYPES = {"rdma_rxe": "rxe", "siw": "siw"}


def run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, timeout=DEADLINE_S, capture_output=not check)


@pytest.fixture
def link(adapter_name):
    """The names (adapter, netdev) of a new link of the kind under test. It has its own veth pair."""
    if os.geteuid() or not Path("/dev/virtio-ports/ndpy.control").exists():
        pytest.skip("adds and removes network devices: only inside the VM of `ndpy vm run`")
    driver = next(info.driver for info in ndpy.list_adapters() if info.name == adapter_name)
    name = f"{TYPES[driver]}t"
    run("ip", "link", "add", NETDEV, "mtu", "4200", "type", "veth", "peer", "name", f"{NETDEV}p", "mtu", "4200")
    try:
        run("ip", "address", "add", f"{ADDRESS}/24", "dev", NETDEV)
        run("ip", "link", "set", NETDEV, "up")
        run("ip", "link", "set", f"{NETDEV}p", "up")
        run("rdma", "link", "add", name, "type", TYPES[driver], "netdev", NETDEV)
        wait_until(
            lambda: any(
                info.name == name and info.state == "active" and info.addresses for info in ndpy.list_adapters()
            ),
            "the new link is active and has an address",
        )
        yield name, NETDEV
    finally:
        # Both commands wait in the kernel until nobody uses the device, so they have a time limit.
        run("rdma", "link", "delete", name, check=False)
        run("ip", "link", "delete", NETDEV, check=False)


def on_a_link(what: str, link: tuple[str, str]) -> Process:
    return Process(sys.executable, "-X", "dev", Path(__file__).parent / "on_a_link.py", what, *link)


@pytest.mark.parametrize("what", ["removal", "removal_in_a_scenario", "second_removal"])
def test_a_removed_device_makes_every_object_say_so_and_closing_lets_it_go(link, what):
    """`rdma link delete` waits for the program. It ends once the program has closed everything."""
    with on_a_link(what, link) as process:
        result = process.succeed(90)
    assert result.out.splitlines()[0] == "ready"
    assert result.out.splitlines()[-1] == "gone"


def test_the_port_goes_down_and_up(link):
    with on_a_link("port", link) as process:
        result = process.succeed(90)
    assert result.out.splitlines()[-1] == "works again"
