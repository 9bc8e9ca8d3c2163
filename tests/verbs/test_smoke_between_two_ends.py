"""`ndpy smoke --peer` between two adapters whose links differ: two ends of a veth pair, inside the VM."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, only_under_stress, wait_until

import ndpy

pytestmark = pytest.mark.timeout(240)
TYPES = {"rdma_rxe": "rxe", "siw": "siw"}
ENDS = (("ndpye0", "203.0.113.1", "enda"), ("ndpye1", "203.0.113.2", "endb"))
# Each end's packets leave through its own interface, although the machine has both addresses.
RULES = [
    ("pref", "1", "iif", "ndpye0", "lookup", "local"),
    ("pref", "2", "iif", "ndpye1", "lookup", "local"),
    ("pref", "3", "from", ENDS[0][1], "to", ENDS[1][1], "lookup", "101"),
    ("pref", "4", "from", ENDS[1][1], "to", ENDS[0][1], "lookup", "102"),
    ("pref", "10", "lookup", "local"),
]


def run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, timeout=DEADLINE_S, capture_output=not check)


@pytest.fixture(scope="module")
def ends(adapter_name):
    """The adapters of the two ends. Both links have an MTU of 4200 bytes."""
    if os.geteuid() or not Path("/dev/virtio-ports/ndpy.control").exists():
        pytest.skip("adds and removes network devices: only inside the VM of `ndpy vm run`")
    kind = TYPES[next(info.driver for info in ndpy.list_adapters() if info.name == adapter_name)]
    run("ip", "link", "add", "ndpye0", "mtu", "4200", "type", "veth", "peer", "name", "ndpye1", "mtu", "4200")
    with contextlib.ExitStack() as undo:
        undo.callback(run, "ip", "link", "delete", "ndpye0", check=False)
        for netdev, address, _ in ENDS:
            run("ip", "address", "add", f"{address}/24", "dev", netdev)
            run("ip", "link", "set", netdev, "up")
            for setting, value in (("rp_filter", "0"), ("accept_local", "1")):
                Path(f"/proc/sys/net/ipv4/conf/{netdev}/{setting}").write_text(value)
        filtered = Path("/proc/sys/net/ipv4/conf/all/rp_filter")
        undo.callback(filtered.write_text, filtered.read_text())
        filtered.write_text("0")
        run("ip", "route", "add", ENDS[1][1], "dev", "ndpye0", "table", "101")
        run("ip", "route", "add", ENDS[0][1], "dev", "ndpye1", "table", "102")
        for rule in RULES:
            run("ip", "rule", "add", *rule)
            undo.callback(run, "ip", "rule", "del", *rule, check=False)
        # The rule of the local addresses is the first one otherwise.
        run("ip", "rule", "del", "pref", "0")
        undo.callback(run, "ip", "rule", "add", "pref", "0", "lookup", "local")
        for netdev, _, name in ENDS:
            run("rdma", "link", "add", name, "type", kind, "netdev", netdev)
            undo.callback(run, "rdma", "link", "delete", name, check=False)
        wait_until(
            lambda: (
                {name for _, _, name in ENDS} <= {info.name for info in ndpy.list_adapters() if info.state == "active"}
            ),
            "the two adapters are active",
        )
        yield kind


@pytest.fixture
def mtus():
    """Set the MTU of an end's interface until the end of the test."""
    yield lambda end, mtu: run("ip", "link", "set", ENDS[end][0], "mtu", str(mtu))
    for netdev, _, _ in ENDS:
        run("ip", "link", "set", netdev, "mtu", "4200")


def smoke_between(near: int, far: int) -> tuple[int, dict[str, str]]:
    """The group `link` of a smoke test from one end to the other. Returns its status, and each check's lines by its
    name.
    """
    serve = [sys.executable, "-m", "ndpy", "smoke", "--serve", ENDS[far][2], "--listen", f"{ENDS[far][1]}:0"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            port = int(re.search(r":(\d+)\. ", server.stdout.readline()).group(1))
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "ndpy",
                    "smoke",
                    ENDS[near][2],
                    "--peer",
                    f"{ENDS[far][1]}:{port}",
                    "--only",
                    "link",
                ],
                capture_output=True,
                text=True,
                timeout=150,
            )
        finally:
            server.send_signal(signal.SIGINT)
    print(done.stdout, done.stderr)
    checks = re.findall(r"^(\w+ +link/[\s\S]*?)(?=^\w)", done.stdout, re.MULTILINE)
    return done.returncode, {re.search(r"link/(\S+)", check).group(1): check for check in checks}


@only_under_stress  # in the usual run tests/hosts does this
def test_ends_that_agree_pass_and_see_each_other(ends):
    status, checks = smoke_between(0, 1)
    assert status == 0
    assert "link MTU 4200;" in checks["ends-agree"]
    assert "this end sees 203.0.113.1 to 203.0.113.2" in checks["each-other"]
    assert "the peer sees 203.0.113.2 to 203.0.113.1" in checks["each-other"]
    if ends == "rxe":
        assert "GID type RoCE v2; VLAN none" in checks["ends-agree"]
        assert "packets of 256 to 4096 bytes" in checks["path-mtu"]
        assert "GID 203.0.113.1 to 203.0.113.2" in checks["each-other"]
    else:
        assert "messages of 256 to 16384 bytes arrive" in checks["path-mtu"]


# On Linux 6.1 rxe may spin in post_send() for ever, so that the machine stops, when packets that it has just sent get
# lost.
@only_under_stress
@pytest.mark.parametrize(("near", "far", "wrong"), [(0, 1, "the peer"), (1, 0, "this end")])
def test_an_mtu_of_1500_on_one_end_names_that_end(ends, mtus, near, far, wrong):
    mtus(1, 1500)
    status, checks = smoke_between(near, far)
    place = "this machine" if wrong == "this end" else "the peer"
    assert f"Probably {wrong} is wrong" in checks["ends-agree"]
    assert f"on {place}: ip link set ndpye1 mtu 4200" in checks["ends-agree"].replace("On ", "on ")
    if ends == "siw":
        # TCP agrees on the smaller segment.
        assert status == 0
        return
    assert status == 1
    assert checks["ends-agree"].startswith("FAIL")
    assert "packets of more than 1024 bytes get lost" in checks["ends-agree"]
    if wrong == "this end":
        # The client chooses the path MTU by its own link.
        assert "the connection uses path MTU 1024" in checks["path-mtu"]
        return
    assert checks["path-mtu"].startswith("FAIL")
    assert "from this end to the peer: packets of 1024 bytes arrive, those of 2048 do not" in checks["path-mtu"]
    assert f"Probably {wrong} is wrong; its link carries packets of 1024 bytes" in checks["path-mtu"]


@only_under_stress
def test_packets_that_get_lost_between_two_good_ends_are_measured(ends):
    """A switch with a small MTU is played by a filter on the way from the first end to the second one."""
    if ends == "siw":
        pytest.skip("a lost size of packets stalls TCP, whose packets nobody measures here")
    run("tc", "qdisc", "add", "dev", "ndpye0", "clsact")
    try:
        police = ["police", "rate", "10gbit", "burst", "10m", "mtu", "1500", "conform-exceed", "drop"]
        run("tc", "filter", "add", "dev", "ndpye0", "egress", "matchall", "action", *police)
        status, checks = smoke_between(0, 1)
    finally:
        run("tc", "qdisc", "del", "dev", "ndpye0", "clsact")
    assert status == 1
    assert checks["ends-agree"].startswith("PASS")
    assert "from this end to the peer: packets of 1024 bytes arrive, those of 2048 do not" in checks["path-mtu"]
    assert "from the peer to this end" not in checks["path-mtu"]
    assert "look at the switches and routers between them" in checks["path-mtu"]
