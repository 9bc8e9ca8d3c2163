"""`ndpy fleet` on drivers of the kernel, when the network of one rank is worse than that of the others. In the VM.

Each rank has an adapter at a port of one switch. A rank looks at its whole machine, which takes it 10 s of processor
time where that is emulated, and so most of the time of these tests.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.helpers import DEADLINE_S, only_under_stress
from kit.ranks import Ranks

if sys.platform != "linux":
    pytest.skip("these adapters are Linux's", allow_module_level=True)

from networks.cables import Cables, ip, kind_under_test, wait_for_addresses

pytestmark = pytest.mark.timeout(patient(400))
# In seconds, on an emulated machine.
JOIN_S, PAIR_S, RUN_S = 120, 60, 300
# More ranks than a majority needs take a minute longer to begin.
SIZE = 3
PORTS = [f"fleet{rank}" for rank in range(SIZE)]
HOSTS = [f"203.0.113.{rank + 1}" for rank in range(SIZE)]


def _run(*words: str) -> None:
    subprocess.run(words, check=True, timeout=DEADLINE_S)


class Switch:
    """The adapters at its ports, and what is wrong with a port."""

    def __init__(self, adapters: list[str]) -> None:
        self.adapters = adapters

    @contextlib.contextmanager
    def narrow(self, rank: int, mtu: int) -> Iterator[None]:
        """The interface of a rank has another MTU."""
        ip(f"link set {PORTS[rank]} mtu {mtu}")
        try:
            yield
        finally:
            ip(f"link set {PORTS[rank]} mtu 4200")

    @contextlib.contextmanager
    def lossy(self, rank: int, percent: float) -> Iterator[None]:
        """Some of the packets that a rank sends get lost."""
        _run("tc", "qdisc", "add", "dev", PORTS[rank], "root", "netem", "limit", "10000", "loss", f"{percent}%")
        try:
            yield
        finally:
            _run("tc", "qdisc", "del", "dev", PORTS[rank], "root")

    def fleet(self, folder: Path, *words: object) -> tuple[int, dict]:
        """Run between all. Returns the exit status and the report."""
        with contextlib.ExitStack() as stack:
            run = Ranks(stack, folder, SIZE)
            others = [run.start(rank, adapter=self.adapters[rank]) for rank in range(1, SIZE)]
            first = run.first("--join", f"{JOIN_S}s", *words, adapter=self.adapters[0], pair_s=PAIR_S)
            result = first.finish(patient(RUN_S))
            assert run.file.exists(), f"status {result.status}: {result.err}"
            for other in others:
                assert other.succeed(DEADLINE_S).err == ""
        return result.status, run.report()


@pytest.fixture(scope="module")
def switch(adapter_name: str) -> Iterator[Switch]:
    kind = kind_under_test(adapter_name)
    for module in ("bridge", "sch_netem"):
        _run("modprobe", module)
    with contextlib.ExitStack() as stack:
        cables = Cables(kind, stack)
        cables.switch("fleet", PORTS)
        for port, host in zip(PORTS, HOSTS, strict=True):
            cables.up(port, f"{host}/26")
        adapters = [cables.adapter(port) for port in PORTS]
        wait_for_addresses(**{name: [host] for name, host in zip(adapters, HOSTS, strict=True)})
        yield Switch(adapters)


def test_a_rank_with_another_mtu_is_named_with_both(switch, tmp_path):
    """A switch drops the packets that are too large for it, so that it may also fail in pairs."""
    with switch.narrow(2, 1200):
        status, report = switch.fleet(tmp_path, "--rounds", 3)
    name = switch.adapters[2]
    reasons = {suspect["reason"] for suspect in report["suspects"]}
    assert f"{name} interface's MTU is 1200 on n2, and 4200 on 2 of 3 machines" in reasons
    if "rxe" in name:
        assert f"{name} MTU is 1024 on n2, and 4096 on 2 of 3 machines" in reasons
    assert (status, report["drain"]) == (1, ["n2"])
    assert [row for row in report["measurements"] if row[5] is None and 2 not in row[3:5]] == []


@only_under_stress
def test_good_ranks_are_no_suspects(switch, tmp_path):
    status, report = switch.fleet(tmp_path)
    assert (status, report["suspects"]) == (0, [])


@only_under_stress
def test_a_rank_with_two_adapters_measures_with_each(switch, tmp_path):
    """Those of one machine do not meet."""
    one, *two = switch.adapters
    with contextlib.ExitStack() as stack:
        run = Ranks(stack, tmp_path, 2)
        other = run.start(1, two[1], adapter=two[0])
        first = run.first("--join", f"{JOIN_S}s", "--full-mesh", adapter=one, pair_s=PAIR_S)
        assert first.finish(patient(RUN_S)).status == 0
        assert other.succeed(DEADLINE_S).err == ""
    report = run.report()
    assert [(end["rank"], end["node"], end["adapter"]) for end in report["ends"]] == [
        (0, "n0", one),
        *((1, "n1", name) for name in two),
    ]
    assert {frozenset(row[3:5]) for row in report["measurements"]} == {frozenset((0, 1)), frozenset((0, 2))}
    assert all(row[5] is not None for row in report["measurements"])


@only_under_stress
def test_a_rank_that_loses_packets_is_named(switch, tmp_path):
    """Whether it is also slow depends on the load of this machine. rxe counts the negative acknowledgments at the end
    that has to send again."""
    if "siw" in switch.adapters[1]:
        pytest.skip("siw has no counters, and its TCP goes by the loopback interface between addresses of one machine")
    with switch.lossy(1, 0.5):
        status, report = switch.fleet(tmp_path)
    assert (status, report["drain"]) == (1, ["n1"]), report["suspects"]
    (suspect,) = report["suspects"]
    assert suspect["confidence"] >= 0.99
    assert "rcvd_seq_err" in suspect["reason"] and suspect["remedy"].startswith("Look at the cable"), suspect
