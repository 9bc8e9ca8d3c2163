"""`ndpy fleet` on soft0 between network namespaces, when the cable of one of them is slow."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient

if sys.platform != "linux" or not os.environ.get("NDPY_STRESS"):
    pytest.skip("network namespaces of Linux: NDPY_STRESS", allow_module_level=True)

from networks import namespaces

pytestmark = pytest.mark.timeout(patient(180))

SIZE, BAD, PORT = 5, 3, 18522
#: A token bucket: 40 Mb/s after the first 64 KiB.
SLOW = "tbf rate 40mbit burst 64kb latency 50ms"


def _fleet(folder: Path, discipline: str) -> tuple[int, dict[str, Any]]:
    """Run between nodes at the ports of a switch. What node BAD sends passes this queueing discipline."""
    if why := namespaces.why_impossible():
        pytest.skip(f"no network namespaces: {why}")
    file = folder / "report.json"
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(namespaces.Network())
        switch = network.host("switch")
        switch.ip("link add br0 type bridge", "link set br0 up")
        hosts = [network.host(f"n{rank}") for rank in range(SIZE)]
        for rank, host in enumerate(hosts):
            network.cable(host, "eth0", switch, f"port{rank}")
            switch.ip(f"link set port{rank} master br0")
            host.ip(f"address add 192.0.2.{rank + 1}/24 dev eth0")
        if discipline:
            hosts[BAD].run(*f"tc qdisc add dev eth0 root {discipline}".split())

        def start(rank: int, *words: str | Path) -> Any:
            variables = {
                "RANK": rank,
                "WORLD_SIZE": SIZE,
                "MASTER_ADDR": "192.0.2.1",
                "MASTER_PORT": PORT,
                "NDPY_FLEET_NODE": f"n{rank}",
                "NDPY_FLEET_TOKEN": "of-this-test",
                "NDPY_ADAPTER": "soft0",
            }
            settings = [f"{name}={value}" for name, value in variables.items()]
            return hosts[rank].start("env", *settings, sys.executable, "-m", "ndpy", "fleet", "soft0", *words)

        others = [start(rank) for rank in range(1, SIZE)]
        status = start(0, "--json", file).finish(2 * PROGRAM_DEADLINE_S).status
        for other in others:
            other.succeed(PROGRAM_DEADLINE_S)
    return status, json.loads(file.read_text("utf-8"))


def test_a_node_with_a_slow_cable_is_named_alone(tmp_path):
    status, report = _fleet(tmp_path, SLOW)
    assert (status, report["drain"]) == (1, [f"n{BAD}"]), report["suspects"]


def test_good_cables_name_nobody(tmp_path):
    status, report = _fleet(tmp_path, "")
    assert (status, report["suspects"]) == (0, [])
