"""`ndpy fleet --topology lldp`: which nodes share a switch, as lldpd says on each of them."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from kit.deadlines import PROGRAM_DEADLINE_S, patient, wait_until
from kit.processes import Result
from kit.ranks import Ranks

if sys.platform != "linux":
    pytest.skip("lldpd is of Unix", allow_module_level=True)

from networks import namespaces

pytestmark = pytest.mark.timeout(patient(120))


def _run(folder: Path, script: str, size: int) -> tuple[Result, Ranks]:
    """Start ranks for which this shell script stands for lldpctl. $NDPY_FLEET_NODE is their node."""
    program = folder / "bin" / "lldpctl"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    with contextlib.ExitStack() as stack:
        run = Ranks(stack, folder, size, PATH=f"{program.parent}:{os.environ['PATH']}")
        others = [run.start(rank) for rank in range(1, size)]
        result = run.first("--rounds", 3, "--topology", "lldp").succeed(PROGRAM_DEADLINE_S)
        for other in others:
            assert other.succeed(PROGRAM_DEADLINE_S).err == ""
    return result, run


def test_a_node_whose_lldpd_does_not_answer_is_noted(tmp_path):
    answer = json.dumps({"lldp": {"interface": {"eth0": {"chassis": {"sw1": {"id": {"value": "x"}}}}}}})
    script = f"""[ $NDPY_FLEET_NODE = n0 ] && exec echo '{answer}'\necho "nobody answers" >&2; exit 1"""
    result, run = _run(tmp_path, script, 2)
    assert [end["groups"] for end in run.report()["ends"]] == [["leaf sw1"], []]
    assert "note: the switches of n1 are unknown: lldpctl: nobody answers; does lldpd run" in result.out
    assert "note: the topology does not have n1" in result.out


class Daemon:
    """An lldpd in a namespace. Its socket is a file, which other namespaces reach too."""

    def __init__(self, host: namespaces.Host, name: str, socket: Path) -> None:
        # It reads its settings before it begins. One that is told later sometimes hears nobody from then on.
        settings = socket.with_suffix(".conf")
        settings.write_text(f"configure system hostname {name}\nconfigure lldp tx-interval 1\n")
        self._process = host.start("lldpd", "-d", "-u", socket, "-O", settings)
        self._socket = socket
        wait_until(socket.exists, f"the lldpd of {name} listens")

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        # It ends its other process, which SIGKILL would not.
        self._process.popen.send_signal(signal.SIGTERM)
        self._process.finish()

    def _tell(self, *words: str) -> str:
        command = ["lldpcli", "-u", str(self._socket), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROGRAM_DEADLINE_S).stdout

    def hears(self) -> bool:
        """Whether it has heard somebody."""
        time.sleep(0.5)
        return "Chassis" in self._tell("show", "neighbors")


@pytest.mark.skipif(not os.environ.get("NDPY_STRESS"), reason="daemons in namespaces: NDPY_STRESS")
def test_switches_that_lldpd_hears_are_leafs(tmp_path):
    """Two switches with two nodes each. Each has a namespace and an lldpd of its own."""
    if shutil.which("lldpd") is None:
        pytest.skip("there is no lldpd: rig/setup.sh fleet")
    if why := namespaces.why_impossible():
        pytest.skip(f"no network namespaces: {why}")
    nodes = {"n0": "sw0", "n1": "sw0", "n2": "sw1", "n3": "sw1"}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(namespaces.Network())
        hosts = {name: network.host(name) for name in (*dict.fromkeys(nodes.values()), *nodes)}
        for switch in dict.fromkeys(nodes.values()):
            hosts[switch].ip("link add br0 type bridge", "link set br0 up")
        for node, switch in nodes.items():
            network.cable(hosts[node], "eth0", hosts[switch], f"to-{node}")
            hosts[switch].ip(f"link set to-{node} master br0")
        # The path of a socket has at most 107 characters. lldpctl is another user's, by its set-user-ID bit.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ndpy-lldp-")))
        folder.chmod(0o755)
        daemons = {name: stack.enter_context(Daemon(host, name, folder / name)) for name, host in hosts.items()}
        for node in nodes:
            wait_until(daemons[node].hears, f"{node} hears its switch", PROGRAM_DEADLINE_S)
        _, run = _run(tmp_path, f'exec {shutil.which("lldpctl")} -u {folder}/$NDPY_FLEET_NODE "$@"', 4)
    assert [end["groups"] for end in run.report()["ends"]] == [[f"leaf {switch}"] for switch in nodes.values()]
