"""The rc_pingpong example against programs on pyverbs (rdma-core's) and on PyPI's ibverbs (rdma4py), in both roles.

They run in .rig/bench, as the benchmark's loops do: pyverbs is built for the system's Python only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.helpers import has_kernel_driver, sample
from kit.processes import ROOT, Process, foreign_environment, free_port, start_example, wait_for_tcp_listener
from kit.quirks import skip_where

from ndpy.vocabulary.quirks import Quirk

PYTHON = ROOT / ".rig/bench/venv/bin/python"
PROGRAMS = Path(__file__).with_name("programs")
SIZE, COUNT = 10007, 20
ROLES = [("pyverbs", "client"), ("ibverbs", "server"), ("pyverbs", "server"), ("ibverbs", "client")]


@pytest.fixture
def their_end(adapter, pytestconfig):
    """Call it with the binding, the port, and for a client the host. It starts their end."""
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
    if not PYTHON.exists():
        if pytestconfig.getoption("--adapter"):
            pytest.fail(f"{PYTHON} is missing: make setup")
        pytest.skip("no environment with pyverbs and ibverbs: make setup")
    gids = [gid for gid in adapter.info.ports[0].gids if not gid.address.startswith("fe80")]
    gid = min(gids, key=lambda gid: (gid.type != "RoCE v2", gid.index))

    def start(binding: str, port: int | str, *host: str) -> Process:
        options = {"device": adapter.info.name, "port": port, "gid": gid.index, "size": SIZE, "count": COUNT}
        words = [f"--{name}={value}" for name, value in options.items()]
        return Process(PYTHON, PROGRAMS / f"pingpong_{binding}.py", *words, *host, variables=foreign_environment())

    return start


@pytest.mark.parametrize(("binding", "role"), ROLES)
def test_programs_on_other_bindings_talk_to_ours(adapter, their_end, binding, role):
    if has_kernel_driver(adapter) and (binding, role) not in sample(ROLES, 2):
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine starts Python slowly")
    options = ("-d", adapter.info.name, "-s", SIZE, "-n", COUNT)
    if role == "client":
        with start_example("rc_pingpong", *options, "-p", 0) as server:
            port = server.wait_for(r"listening on TCP port (\d+)")[1]
            with their_end(binding, port, "127.0.0.1") as client:
                theirs = client.succeed()
            ours = server.succeed()
    else:
        number = free_port()
        with their_end(binding, number) as server:
            wait_for_tcp_listener(server, number)
            with start_example("rc_pingpong", *options, "-p", number, "127.0.0.1") as client:
                ours = client.succeed()
            theirs = server.succeed()
    assert f"{COUNT} messages of {SIZE} bytes verified" in theirs.out
    assert f"{COUNT} iters of {SIZE} bytes verified" in ours.out
