"""A host that falls silent in the middle of traffic. The ends of a veth pair stand for two hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, sample, wait_until
from kit.processes import Process
from kit.quirks import expect_quirk

import ndpy
from ndpy.vocabulary.quirks import Quirk

NETDEVS = ("ndpyt0", "ndpyt1")
ADDRESSES = ("203.0.113.1", "203.0.113.2")
NAMES = ("rxet0", "rxet1")
TABLE = "700"


def run(*command: str, check: bool = True) -> None:
    done = subprocess.run(command, timeout=DEADLINE_S, capture_output=True, text=True)
    assert not check or not done.returncode, f"{command}: {done.stderr}"


def route_through_the_pair() -> None:
    """Have the two addresses reach each other through the pair. By default they meet inside this machine."""
    for netdev, own, other, peer in zip(NETDEVS, ADDRESSES, ADDRESSES[::-1], NETDEVS[::-1], strict=True):
        for name, value in (("accept_local", 1), ("rp_filter", 0)):
            Path(f"/proc/sys/net/ipv4/conf/{netdev}/{name}").write_text(f"{value}\n")
        hardware = Path(f"/sys/class/net/{peer}/address").read_text().strip()
        run("ip", "neigh", "replace", other, "lladdr", hardware, "dev", netdev, "nud", "permanent")
        run("ip", "route", "add", other, "dev", netdev, "src", own, "table", TABLE)
        run("ip", "rule", "add", "pref", "10", "iif", netdev, "lookup", "local")
    Path("/proc/sys/net/ipv4/conf/all/rp_filter").write_text("0\n")
    run("ip", "rule", "add", "pref", "20", "to", "203.0.113.0/24", "lookup", TABLE)
    # The rule for local addresses comes first by default.
    run("ip", "rule", "add", "pref", "500", "lookup", "local")
    run("ip", "rule", "del", "pref", "0")


def route_as_before() -> None:
    run("ip", "rule", "add", "pref", "0", "lookup", "local", check=False)
    for preference in ("10", "10", "20", "500"):
        run("ip", "rule", "del", "pref", preference, check=False)
    run("ip", "route", "flush", "table", TABLE, check=False)


@pytest.fixture
def link(adapter_name):
    """The names of two adapters at the ends of a link, and of their netdevs."""
    if os.geteuid() or not Path("/dev/virtio-ports/ndpy.control").exists():
        pytest.skip("adds and removes network devices: only inside the VM of `ndpy vm run`")
    info = next(info for info in ndpy.list_adapters() if info.name == adapter_name)
    if ndpy.Capability.RETRY_POLICY not in info.capabilities:
        pytest.skip(f"{adapter_name} does not claim RETRY_POLICY")
    near, far = NETDEVS
    run("ip", "link", "add", near, "mtu", "4200", "type", "veth", "peer", "name", far, "mtu", "4200")
    try:
        for netdev, address in zip(NETDEVS, ADDRESSES, strict=True):
            run("ip", "address", "add", f"{address}/32", "dev", netdev)
            run("ip", "link", "set", netdev, "up")
        route_through_the_pair()
        for name, netdev in zip(NAMES, NETDEVS, strict=True):
            run("rdma", "link", "add", name, "type", "rxe", "netdev", netdev)
        wait_until(
            lambda: {info.name for info in ndpy.list_adapters() if info.state == "active"} >= set(NAMES),
            "both adapters are active",
        )
        yield (*NAMES, *NETDEVS)
    finally:
        for name in NAMES:
            run("rdma", "link", "delete", name, check=False)
        run("ip", "link", "delete", near, check=False)
        route_as_before()


def on_two_ends(what: str, link: tuple[str, ...]) -> str:
    with Process(sys.executable, "-X", "dev", Path(__file__).parent / "on_two_ends.py", what, *link) as process:
        out = process.succeed(240).out
    print(out)
    return out


# tests/hosts/test_death.py has the default policy too, with a host that really dies.
@pytest.mark.parametrize("what", sample(["silence_with_seven", "silence_with_default"], 1))
def test_a_host_that_falls_silent_is_noticed_within_the_time_of_the_connection(link, what):
    """Seven retries never end on rxe (Quirk.RXE_RETRIES_FOR_EVER). The connection manager asks for longer than 2 s."""
    assert on_two_ends(what, link).count("ended") == 2


def test_who_leaves_a_silent_host_does_not_have_to_wait(link):
    assert "disconnect() has ended" in on_two_ends("leaving", link)


def test_a_request_ends_although_the_path_carries_shorter_packets_than_before(request, adapter, link):
    expect_quirk(request, adapter, Quirk.RXE_SPINS_ON_LONG_PACKETS)
    assert "\n1 completions" in on_two_ends("shrink", link)
