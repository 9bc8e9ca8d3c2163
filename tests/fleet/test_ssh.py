"""`ndpy fleet --hosts` over ssh to servers of the tests' own, at addresses of the loopback interface.

`rig/setup.sh fleet` installs Debian's openssh-server. Its service need not run.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from kit.deadlines import DEADLINE_S, PROGRAM_DEADLINE_S, patient, wait_until
from kit.processes import ROOT, Process, free_port

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("ssh: NDPY_STRESS", allow_module_level=True)

pytestmark = pytest.mark.timeout(patient(180))

TOKEN = "a token that no command line has"
NDPY = f"env PYTHONPATH={shlex.quote(str(ROOT))} {sys.executable} -m ndpy"
#: What is wrong at each address, for the shell script that stands for ndpy there.
MISFORTUNES = f"""\
#!/bin/sh
set -- "$(echo "$SSH_CONNECTION" | cut -d' ' -f3)" "$@"
host=$1; shift
case $host in
127.0.0.4) exec no-such-ndpy "$@" ;;
127.0.0.5) echo "the library is broken" >&2; exit 3 ;;
127.0.0.6) exec env PYTHONPATH={ROOT} {sys.executable} -c "import sys, ndpy; ndpy.__version__ = '0.0.9'; \
sys.argv[0] = 'ndpy'; from ndpy.tools.cli import main; main()" "$@" ;;
esac
exec {NDPY} "$@"
"""
PASSWORD = "AuthenticationMethods password\nPasswordAuthentication yes\n"
CONFIGURATION = """\
Port {port}
{addresses}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
StrictModes no
UsePAM no
"""


class Servers:
    """Two ssh servers: one at 127.0.0.2 to .7, and one at .8 that wants a password. Nobody is at .9."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        sshd = shutil.which("sshd") or "/usr/sbin/sshd"
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
            subprocess.run(command, check=True, timeout=DEADLINE_S)
        for name, last, more in (("key", range(2, 8), ""), ("password", range(8, 9), PASSWORD)):
            addresses = "\n".join(f"ListenAddress 127.0.0.{at}" for at in last)
            file = folder / f"{name}.conf"
            file.write_text(CONFIGURATION.format(port=self.port, folder=folder, addresses=addresses) + more)
            self.process = stack.enter_context(Process(sshd, "-D", "-e", "-f", file))
            self.process.wait_for("Server listening", DEADLINE_S, stream="err")
        self.options = shlex.join(
            ["-p", str(self.port), "-i", str(folder / "user"), "-l", getpass.getuser()]
            + [f"-o{word}" for word in ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")]
            + ["-F", "none", "-oIdentitiesOnly=yes"]
        )


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    # sshd wants this folder, which the service's start makes.
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with contextlib.ExitStack() as stack:
        yield Servers(stack, tmp_path_factory.mktemp("ssh"))


class Fleet:
    """Runs of `ndpy fleet --hosts`."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers, self.report_file = servers, folder / "report.json"
        self.variables = {"MASTER_PORT": str(free_port()), "NDPY_FLEET_TOKEN": TOKEN}

    def start(self, hosts: str, *words: str, program: str = NDPY, **variables: str) -> Process:
        command = (sys.executable, "-m", "ndpy", "fleet", "--hosts", hosts, "--program", program, "soft0")
        command += ("--ssh-options", self.servers.options, "--json", str(self.report_file), *words)
        return Process(*command, variables={**self.variables, **variables})

    def report(self) -> dict:
        return json.loads(self.report_file.read_text("utf-8"))


@pytest.fixture
def fleet(servers, tmp_path):
    return Fleet(servers, tmp_path)


def members() -> list[psutil.Process]:
    """The members that run, and the processes that measure for them."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if {"fleet", "--member"} <= set(process.cmdline()[:6]) and str(ROOT) == process.environ().get("PYTHONPATH"):
                found += [process, *process.children()]
    return found


def test_ranks_on_all_hosts_meet_and_no_command_line_has_the_token(fleet):
    with fleet.start("127.0.0.[2-4]", "--full-mesh") as process:
        process.wait_for("3 of 3 ranks on 3 machines", PROGRAM_DEADLINE_S, stream="err")
        for each in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                assert TOKEN not in " ".join(each.cmdline())
        process.succeed(PROGRAM_DEADLINE_S)
    told = fleet.report()
    assert (told["engine"], told["suspects"], len(told["measurements"])) == ("ssh", [], 9)
    assert [machine["node"] for machine in told["machines"]] == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
    wait_until(lambda: not members(), "all members have ended", DEADLINE_S)


def test_hosts_that_cannot_take_part_are_named_with_what_ssh_says(fleet):
    script = fleet.servers.folder / "ndpy"
    script.write_text(MISFORTUNES)
    script.chmod(0o755)
    with fleet.start("127.0.0.[2-9]", "--full-mesh", program=str(script)) as process:
        result = process.finish(PROGRAM_DEADLINE_S)
    assert result.status == 1
    told = fleet.report()
    found = {suspect["nodes"][0]: (suspect["reason"], suspect["remedy"]) for suspect in told["suspects"]}
    assert told["drain"] == [f"127.0.0.{at}" for at in (4, 5, 6, 8, 9)]
    assert "drain: 127.0.0.[4-6,8-9]" in result.out
    assert "no-such-ndpy: not found" in found["127.0.0.4"][0]
    assert "say with --program how it is started" in found["127.0.0.4"][1]
    assert "the library is broken" in found["127.0.0.5"][0]
    assert "it has ndpy 0.0.9" in found["127.0.0.6"][0]
    assert "Permission denied" in found["127.0.0.8"][0]
    assert found["127.0.0.8"][1] == "make `ssh -o BatchMode=yes 127.0.0.8 true` work here"
    assert "Connection refused" in found["127.0.0.9"][0]
    # The other three have measured.
    assert len({frozenset(row[3:5]) for row in told["measurements"]}) == 3


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_when_the_command_ends_so_do_all_members(fleet, how):
    with fleet.start("127.0.0.[2-5]", "--rounds", "1000") as process:
        process.wait_for("round 2:", PROGRAM_DEADLINE_S, stream="err")
        assert len(members()) >= 8
        began = time.monotonic()
        process.popen.send_signal(how)
        result = process.finish(PROGRAM_DEADLINE_S)
        wait_until(lambda: not members(), lambda: f"{members()} have ended", patient(3))
    assert result.status == (130 if how == signal.SIGINT else -how)
    assert time.monotonic() - began < patient(4)


def test_a_member_that_is_still_joining_ends_with_its_input(fleet):
    """Nobody answers at the address that it tries."""
    word = {"hosts": "127.0.0.1", "port": free_port(), "token": "YWJj"}
    with Process(sys.executable, "-m", "ndpy", "fleet", "--member", "soft0") as process:
        process.say(json.dumps(word))
        time.sleep(patient(2))
        assert process.popen.poll() is None
        process.popen.stdin.close()
        assert process.finish(patient(5)).status == 130


def test_a_member_without_its_words_says_what_it_is_for():
    with Process(sys.executable, "-m", "ndpy", "fleet", "--member", "soft0") as process:
        process.say("{}")
        result = process.finish(PROGRAM_DEADLINE_S)
    assert (result.status, "--member is for `ndpy fleet --hosts`" in result.err) == (1, True)


def test_hosts_behind_a_gateway_take_part(fleet):
    """ClusterShell's tree: 127.0.0.2 starts the members of the others."""
    folder = fleet.servers.folder / "clustershell"
    folder.mkdir()
    own = socket.gethostname().partition(".")[0]
    (folder / "topology.conf").write_text(f"[routes]\n{own}: 127.0.0.2\n127.0.0.2: 127.0.0.[3-5]\n")
    variables = {"CLUSTERSHELL_CFGDIR": str(folder), "CLUSTERSHELL_GW_PYTHON_EXECUTABLE": sys.executable}
    with fleet.start("127.0.0.[3-5]", "--full-mesh", **variables) as process:
        process.wait_for("3 of 3 ranks", PROGRAM_DEADLINE_S, stream="err")
        gateways = [
            each for each in psutil.process_iter(["cmdline"]) if "ClusterShell.Gateway" in (each.info["cmdline"] or ())
        ]
        assert gateways
        process.succeed(PROGRAM_DEADLINE_S)
    assert (fleet.report()["suspects"], fleet.report()["ranks"]) == ([], 3)
    wait_until(lambda: not members(), "all members have ended", DEADLINE_S)
