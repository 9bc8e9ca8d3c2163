"""ndpy vm with a real VM. Each test boots one, so one test checks all that one boot can show."""

import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from importlib import resources

import psutil
import pytest
from kit import linux_only as linux_only
from kit.deadlines import patient
from kit.helpers import only_under_stress

from ndpy.tools.machines import SetupError, tools, vm
from ndpy.tools.machines import run as runner

# Longer than the VM's own limits. A busy machine comes near those.
BOOT_S = 400
pytestmark = [pytest.mark.vm, pytest.mark.timeout(BOOT_S + 100)]


@pytest.fixture(autouse=True)
def vm_possible():
    absent = tools.missing(tools.FOR_VM)
    if absent:
        pytest.skip(tools.explain_missing(absent))
    try:
        tools.find_kernel()
    except SetupError as error:
        pytest.skip(str(error))


def alive(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def arguments(*words):
    return [sys.executable, "-m", "ndpy", "vm", "run", "--vm", *words]


def run(*words, **options):
    return subprocess.run(arguments(*words), capture_output=True, timeout=BOOT_S, check=False, **options)


def expected_output():
    lines = [f"line {i} äöü€ 🎉 \x00\x01\x7f\t|\r{'x' * (i % 97)}\n" for i in range(10_000)]
    return "".join(lines).encode()


SEVERAL_COMMANDS = """
    from ndpy.tools.cli import main

    def ndpy(*words):
        try:
            main(["softroce", *words])
        except SystemExit as end:
            return end.code

    ndpy("up")
    ndpy("down", "rxe0")
    ndpy("up", "--netdev", "veth0")
    ndpy("up", "--netdev", "veth0")
    ndpy("down")
    ndpy("up", "--netdev", "veth9")
    nested = ("run", "--", "sh", "-c", "echo nested; exit 3")
    print("status", ndpy(*nested), flush=True)
    ndpy("up", "--netdev", "veth0")
    print("status", ndpy(*nested), flush=True)
"""


def test_vm_passes_on_output_status_environment_folder_and_files(tmp_path):
    """One boot shows all of this.

    Output: 10,000 lines unchanged and in order, both streams apart, status 37, no standard input. Environment, folder
    and arguments are the same. Files are written back. Links are removed and made again.
    """
    checkout = tmp_path / "a checkout"
    inner = checkout / "inner"
    inner.mkdir(parents=True)
    (checkout / ".git").mkdir()
    (checkout / "big").write_bytes(expected_output())
    # One process for all of them: each start of ndpy takes 15 s in emulation.
    (inner / "several.py").write_text(textwrap.dedent(SEVERAL_COMMANDS))
    script = f"""
        cat ../big
        echo to the other >&2
        cat; pwd; id -u; ulimit -l; printf '%s|' "$NDPY_TEST_ODD" "$1"; echo
        echo from inside >../written
        touch /tmp/in-the-vm && ls /sys/class/infiniband
        cat /sys/class/infiniband/rxe0/ports/1/gids/[12]
        {sys.executable} several.py
        exit 37
    """
    environment = {**os.environ, "NDPY_TEST_ODD": "it's $HOME\nand more", "PYTHONPATH": os.getcwd()}
    done = run("--", "sh", "-c", script, "sh", "an argument", cwd=inner, env=environment)
    big = expected_output()
    assert done.stdout[: len(big)] == big, f"status {done.returncode}, standard error:\n{done.stderr.decode()}"
    told = done.stdout[len(big) :].decode().splitlines()
    assert told[:5] == [str(inner), "0", "unlimited", "it's $HOME", "and more|an argument|"]
    assert "rxe0" in told
    assert "0000:0000:0000:0000:0000:ffff:c000:0201" in told
    assert "2001:0db8:0000:0000:0000:0000:0000:0001" in told
    links = told[told.index("rxe0 already exists") :]
    assert links[:5] == [
        "rxe0 already exists",
        "removed: rxe0",
        "rxe0 created",
        "rxe0 already exists",
        "removed: rxe0",
    ]
    assert [line for line in told if "nested" in line or "status" in line] == ["nested", "status 3"] * 2
    errors = done.stderr.decode()
    assert "to the other" in errors
    assert "there is no network interface veth9" in errors
    assert (checkout / "written").read_text() == "from inside\n"
    assert not os.path.exists("/tmp/in-the-vm")
    assert done.returncode == 37


@only_under_stress
def test_vm_reports_trouble_in_the_kernel_log(tmp_path):
    """The command passes, so the status says that the kernel failed."""
    log = tmp_path / "log"
    script = 'echo "<4>WARNING: CPU: 0 PID: 1 at rxe_pool.c:1 __rxe_cleanup" >/dev/kmsg'
    done = run("--keep-log", str(log), "--", "sh", "-c", script)
    assert done.returncode == runner.EXIT_KERNEL
    assert "WARNING: CPU: 0" in done.stderr.decode()
    assert "WARNING: CPU: 0" in log.read_text()


@only_under_stress
def test_vm_that_panics_is_reported_with_its_last_words():
    done = run("--", "sh", "-c", "echo before; sleep 1; echo c >/proc/sysrq-trigger; sleep 60")
    assert done.returncode == runner.EXIT_SETUP
    assert done.stdout == b"before\n"
    assert "Kernel panic - not syncing: sysrq triggered crash" in done.stderr.decode()


# A boot without a file system panics.
ONE_BOOT_WITHOUT_INIT = """#!{python}
import os, pathlib, sys
words = sys.argv[1:]
boots = pathlib.Path(__file__).with_name("boots")
if "-append" in words: # QEMU is asked for its version too
    at = words.index("-append") + 1
    if not boots.exists():
        words[at] = f"rdinit=/nowhere {{words[at]}}"
    boots.open("a").write("x")
os.execv("{qemu}", ["{qemu}", *words])
"""
# A kernel that survives an oops prints this on its console and sets this bit.
OOPS_OF_THE_SECOND_BOOT = """
case $(wc -c <{folder}/boots) in 2)
    echo "<1>Oops: int3: 0000 [#1] SMP NOPTI" >/dev/kmsg
    echo 128 >/proc/sys/kernel/tainted
esac
"""


@only_under_stress
@pytest.mark.timeout(3 * BOOT_S + 100)
def test_vm_that_panics_or_has_an_oops_while_it_boots_is_booted_again(tmp_path, monkeypatch):
    """Three boots: a panic, an oops after which the machine would continue, and a good one."""
    qemu = tmp_path / "qemu-system-x86_64"
    qemu.write_text(ONE_BOOT_WITHOUT_INIT.format(python=sys.executable, qemu=tools.find("qemu-system-x86_64")))
    qemu.chmod(0o755)
    script = resources.files("ndpy.tools.machines").joinpath("guest.sh").read_text("utf-8")
    before, begin, rest = script.partition("# 128: ")
    (tmp_path / "guest.sh").write_text(before + OOPS_OF_THE_SECOND_BOOT.format(folder=tmp_path) + begin + rest)
    monkeypatch.setattr(vm.resources, "files", lambda package: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    said = []
    outcome = vm.run(["sh", "-c", "echo ran >>ran"], vm.Machine(kvm=False), 60, said.append)
    assert outcome.status == 0
    assert (tmp_path / "ran").read_text() == "ran\n"
    assert len(said) == 5
    assert "Kernel panic - not syncing" in said[1]
    assert "Oops: int3: 0000 [#1] SMP NOPTI" in said[3]


@only_under_stress
def test_vm_that_is_not_done_in_time_is_ended_even_if_a_link_cannot_be_removed():
    """rxe0 is open, so its removal waits in the kernel and ignores signals. `down` gives up, and so does the VM."""
    script = f"""
        ibv_asyncwatch -d rxe0 & sleep 2
        {sys.executable} -m ndpy softroce down rxe0; echo down $?
        sleep 600
    """
    start = time.monotonic()
    limit_s = math.ceil(patient(32))
    done = run("--limit", str(limit_s), "--", "sh", "-c", script)
    assert done.returncode == runner.EXIT_LIMIT
    assert "down 1" in done.stdout.decode()
    assert "a process has it open" in done.stderr.decode()
    assert f"did not finish within {limit_s} s" in done.stderr.decode()
    assert time.monotonic() - start < limit_s + BOOT_S - 132


@only_under_stress
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_signal_ends_the_vm(number):
    """This includes SIGKILL. The VM sees that the host's end has closed, and powers off."""
    with subprocess.Popen(
        arguments("--", "sh", "-c", "echo ready; sleep 600"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            children = psutil.Process(process.pid).children(recursive=True)
            assert any("qemu" in child.name() for child in children)
            process.send_signal(number)
            assert process.wait(120) == (-number if number == signal.SIGKILL else 128 + number)
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [child for child in children if alive(child)] == []


@only_under_stress
def test_vm_and_this_machine_reach_each_other_over_the_user_network():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("127.0.0.1", 0)) as free:
        free_port = free.getsockname()[1]
        free.close()
        script = f"""
            import socket
            with socket.create_server(("10.0.2.15", 7174)) as listener:
                socket.create_connection(("10.0.2.2", {here.getsockname()[1]})).close()
                connection, _ = listener.accept()
                connection.sendall(b"from the VM")
        """
        here.settimeout(BOOT_S)
        command = arguments("--forward", f"{free_port}:7174", "--", sys.executable, "-c", textwrap.dedent(script))
        with subprocess.Popen(command) as process:
            here.accept()[0].close()
            with socket.create_connection(("127.0.0.1", free_port), BOOT_S) as connection:
                connection.settimeout(BOOT_S)
                assert connection.recv(100) == b"from the VM"
            assert process.wait(120) == 0
