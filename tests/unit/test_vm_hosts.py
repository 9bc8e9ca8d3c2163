"""Two hosts of `ndpy vm run --hosts 2`, played by a stand-in for virtme-ng."""

import os
import signal
import subprocess
import sys
import time

import fake_vng
import psutil
import pytest
from click.testing import CliRunner
from kit import linux_only as linux_only

from ndpy.tools.cli import main
from ndpy.tools.machines import SetupError, hosts, vm
from ndpy.tools.machines import run as runner

# Each host is a process that does what the file host-NUMBER next to this program says, in Python.
STAND_IN = r"""
number = int(re.search(r":0(\d)/", settings["WIRES"])[1])
(here / f"id-{number}").write_text(str(os.getpid()))
(here / f"options-{number}").write_text(words)
(here / f"command-{number}").write_text((job / "command").read_text())
plain_ready = ready

def ready():
    plain_ready()
    (here / f"began-{number}").write_text(str(time.monotonic()))

connect()
exec((here / f"host-{number}").read_text())
time.sleep(600)
"""

# Runs the two hosts as `ndpy vm` does, in a process of its own.
PROGRAM = """
import sys
from pathlib import Path
from ndpy.tools.machines import tools
tools.missing = lambda programs: {}
tools.find = lambda name: sys.argv[1]
tools.find_kernel = lambda *arguments: tools.Kernel("7.2.13", Path("/boot/vmlinuz-7.2.13"))
from ndpy.tools.cli import main
main(["vm", "run", "--hosts", "2", "--no-kvm", "--", "true"])
"""


class Hosts:
    def __init__(self, folder):
        self.folder = folder
        self.said = []

    def play(self, first, second):
        (self.folder / "host-1").write_text(first)
        (self.folder / "host-2").write_text(second)

    def run(self, limit_s=20, **options):
        return hosts.run(["true"], vm.Machine(adapters=("rxe",), kvm=False, **options), limit_s, self.said.append)

    def status(self, **options):
        request = runner.Request(
            ("true",), 20, adapter="rxe", machine=vm.Machine(adapters=("rxe",), kvm=False), hosts=2, **options
        )
        return runner.run(request, self.said.append)

    def read(self, name):
        return (self.folder / name).read_text()

    def left(self):
        return [path.name for path in self.folder.glob("id-*") if psutil.pid_exists(int(path.read_text()))]


@pytest.fixture
def pair(monkeypatch, tmp_path):
    fake_vng.install(monkeypatch, tmp_path, STAND_IN)
    monkeypatch.setattr(vm, "GRACE_S", 1.0)
    pair = Hosts(tmp_path)
    yield pair
    assert pair.left() == []


def test_both_commands_begin_when_both_hosts_have_booted(pair, capfd):
    pair.play("time.sleep(2); booted = time.monotonic(); ready(); say(f'{booted}'); end(0)", "ready(); end(0)")
    assert [outcome.status for outcome in pair.run()] == [0, 0]
    booted = float(capfd.readouterr().out.removeprefix("1: "))
    assert float(pair.read("began-2")) >= booted
    assert pair.said[0].startswith("host ")


def test_each_line_of_output_names_its_host(pair, capfd):
    pair.play("ready(); say('one\\ntw'); time.sleep(.3); say('o\\nrest'); end(0)", "ready(); say('other\\n'); end(0)")
    pair.run()
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("1: ")] == ["1: one", "1: two", "1: rest"]
    assert [line for line in lines if not line.startswith("1: ")] == ["2: other"]


def test_a_line_that_does_not_end_is_cut(capfd):
    seen = []
    sink = hosts.Labelled("1: ", seen.append)
    sink(b"x" * 100_000)
    assert b"".join(seen) == b"1: " + b"x" * 100_000 + b"\n"
    sink.finish()
    assert len(seen) == 1


def test_the_environment_tells_who_is_who_and_the_cards_fit(pair):
    pair.play("ready(); end(0)", "ready(); end(0)")
    pair.run()
    for number, other in ((1, 2), (2, 1)):
        command = pair.read(f"command-{number}")
        assert f"export NDPY_HOST={number}\n" in command
        assert f"export NDPY_ADDRESS=203.0.113.{number}\n" in command
        assert f"export NDPY_PEER_ADDRESS=203.0.113.{other}\n" in command
        assert f"export NDPY_CONTROL_ADDRESS=198.18.0.{number}\n" in command
        assert f"export NDPY_PEER_CONTROL_ADDRESS=198.18.0.{other}\n" in command
        options = pair.read(f"options-{number}")
        for network in (1, 2):
            mine = options.split(f"/{network}-{number},remote.type=unix")
            assert len(mine) == 2
            assert f"/{network}-{other}," in mine[1]
            assert f"mac=52:54:00:12:0{network}:0{number}" in options


def test_the_first_failure_is_the_status_and_the_other_host_gets_its_grace(pair):
    pair.play("ready(); time.sleep(30); end(0)", "ready(); end(7)")
    start = time.monotonic()
    first, second = pair.run()
    assert time.monotonic() - start < 15
    assert (first.timed_out, second.status) == (True, 7)
    assert (
        first.reason
        == "host 1: the command did not finish within 1 s after the other host had failed; the VM was ended"
    )


@pytest.mark.parametrize(("first", "second", "status"), [(0, 0, 0), (4, 0, 4), (0, 5, 5), (4, 5, 4)])
def test_the_exit_status_is_that_of_the_first_host_that_failed(pair, first, second, status):
    pair.play(f"ready(); end({first})", f"ready(); end({second})")
    assert pair.status() == status


def test_a_bug_of_either_kernel_counts(pair):
    pair.play("ready(); end(0)", "ready(); end(0, 'BUG: kernel NULL pointer dereference')")
    assert pair.status() == runner.EXIT_KERNEL
    assert any("BUG: kernel NULL" in line for line in pair.said)


def test_each_kernel_log_is_kept(pair, tmp_path):
    pair.play("ready(); end(0, 'of one')", "ready(); end(0, 'of two')")
    assert pair.status(keep_log=tmp_path / "log") == 0
    assert "of one" in pair.read("log.1")
    assert "of two" in pair.read("log.2")


def test_a_host_whose_power_is_cut_ends_at_once_and_counts_as_no_failure(pair):
    pair.play(
        "ready(); time.sleep(1); control.sendall(b'kill\\n'); time.sleep(1); end(0)", "ready(); time.sleep(60); end(0)"
    )
    start = time.monotonic()
    assert pair.status() == 0
    assert time.monotonic() - start < 15


def test_the_survivor_of_a_cut_decides_the_status(pair):
    pair.play("ready(); time.sleep(60)", "ready(); control.sendall(b'kill\\n'); time.sleep(1); end(6)")
    first, second = pair.run()
    assert (first.cut, first.broken, second.cut, second.status) == (True, False, False, 6)


def test_a_host_that_dies_unasked_is_broken_and_ends_the_other_one(pair):
    pair.play("ready(); time.sleep(60)", "ready(); sys.exit(0)")
    first, second = pair.run()
    assert second.broken
    assert not second.cut
    assert first.timed_out
    assert second.reason.startswith("host 2: the VM ended before the command did")


def test_a_host_that_panics_boots_again_while_the_other_one_waits(pair):
    pair.play(
        "ready(); end(0)",
        "flag = here / 'booted'\n"
        "if not flag.exists():\n"
        "    flag.touch(); print('[ 1.0] Kernel panic - not syncing: early', flush=True); sys.exit(1)\n"
        "ready(); end(0)",
    )
    assert [outcome.status for outcome in pair.run()] == [0, 0]


def test_a_host_that_cannot_boot_ends_the_run_with_its_number(pair):
    pair.play("ready(); time.sleep(60)", "control.sendall(b'failed no module rdma_rxe\\n'); time.sleep(60)")
    start = time.monotonic()
    with pytest.raises(SetupError, match="host 2: the VM could not be set up: no module rdma_rxe"):
        pair.run()
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_both_hosts(pair, number):
    pair.play("ready(); time.sleep(600)", "ready(); time.sleep(600)")
    program = str(pair.folder / "vng")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, program], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 20
        while len(list(pair.folder.glob("began-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(list(pair.folder.glob("began-*"))) == 2
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    finally:
        process.kill()
        process.stderr.close()


@pytest.mark.parametrize("option", [["--network"], ["--forward", "1:2"], ["--icount"]])
def test_two_hosts_have_a_network_and_a_clock_of_their_own(option):
    result = CliRunner().invoke(main, ["vm", "run", "--hosts", "2", *option, "--", "true"])
    assert result.exit_code == 2
    assert "--hosts cannot be used together with" in result.output


def test_two_hosts_have_rxe_unless_asked(monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "run", lambda request, say: seen.append(request) or 0)
    for words in ([], ["--adapter", "siw"]):
        CliRunner().invoke(main, ["vm", "run", "--hosts", "2", *words, "--", "true"])
    assert [(request.hosts, request.machine.adapters) for request in seen] == [(2, ("rxe",)), (2, ("siw",))]
    with pytest.raises(ValueError, match="have one kind of adapter"):
        hosts.run(["true"], vm.Machine(), 1, print)
    assert os.environ.get("NDPY_HOST") is None
