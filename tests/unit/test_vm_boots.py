"""Boots of the VM that fail. A stand-in for virtme-ng plays a kernel that panics, hangs or works, as told."""

import os
import subprocess
import time

import fake_vng
import psutil
import pytest
from kit import linux_only as linux_only

from ndpy.tools.machines import SetupError, kvm, vm

# Prints the console of this boot, which is the next file in the folder `boots`. Then it does what the file's name says.
STAND_IN = r"""
boot = min((here / "boots").iterdir(), key=lambda path: int(path.name.partition("-")[0]))
what = boot.name.partition("-")[2]
print(boot.read_text(), end="", flush=True)
boot.unlink()
(here / "ids").open("a").write(f"{os.getpid()}\n")
if what == "ends":
    sys.exit(1)
if what != "hangs":
    connect()
    ready()
    control.sendall(b"begin 1\n")
if what == "runs":
    (here / "command").write_bytes((job / "command").read_bytes())
    say("the command ran\n")
    end(0)
if what == "begins":
    time.sleep(0.2)
    sys.exit("[    9.0] Kernel panic - not syncing: of the command's making")
if what == "locks":
    for seconds in (26, 52, 78, 104, 130):
        print(f"[  {seconds}.5] watchdog: BUG: soft lockup - CPU#1 stuck for {seconds}s! [python:314]", flush=True)
        time.sleep(0.2)
time.sleep(600)
"""

PANIC = "[    0.5] Linux version 7.2\n[    2.661105] Kernel panic - not syncing: Fatal exception in interrupt\n"
OOPS = "[    2.6] Oops: int3: 0000 [#1] SMP NOPTI\n[    2.7] RIP: 0010:sched_clock_cpu+0x9/0x230\n"
WARNING = "[    1.0] WARNING: CPU: 1 PID: 2 at x.c:3\n[    1.1] ---[ end trace 0000000000000000 ]---\n"


class Boots:
    """The behaviour of each boot, the messages meanwhile, and the number of boots."""

    def __init__(self, folder):
        self.folder = folder
        self.said = []
        (folder / "boots").mkdir()

    def add(self, *boots):
        for i, (console, what) in enumerate(boots):
            (self.folder / "boots" / f"{i}-{what}").write_text(console)

    def run(self, **options):
        return vm.run(["true"], vm.Machine(**options), 10, self.said.append)

    def ids(self):
        return [int(line) for line in (self.folder / "ids").read_text().splitlines()]


@pytest.fixture
def boots(monkeypatch, tmp_path):
    fake_vng.install(monkeypatch, tmp_path, STAND_IN)
    return Boots(tmp_path)


BOOTING = "booting Linux 7.2.13 in emulation (about 15 s to boot)"


@pytest.mark.parametrize(
    ("console", "line"),
    [
        (PANIC, "Kernel panic - not syncing: Fatal exception in interrupt"),
        (OOPS, "Oops: int3: 0000 [#1] SMP NOPTI at sched_clock_cpu+0x9/0x230"),
    ],
)
@pytest.mark.parametrize("then", ["hangs", "ends"])
def test_a_kernel_that_panics_while_it_boots_is_booted_again_at_once(boots, capfd, console, line, then):
    boots.add((console, then), (WARNING, "runs"))
    start = time.monotonic()
    assert boots.run(kvm=False).status == 0
    assert time.monotonic() - start < vm._BOOT_LIMIT_S / 4
    assert boots.said == [BOOTING, f"the kernel panicked while it booted, so the VM boots again: {line}", BOOTING]
    assert capfd.readouterr().out == "the command ran\n"
    assert not any(psutil.pid_exists(number) for number in boots.ids())


@pytest.mark.parametrize("cpus", [1, 2])
def test_the_third_panic_is_an_error_that_says_what_where_and_what_to_do(boots, cpus):
    boots.add((OOPS, "hangs"), (PANIC, "ends"), (OOPS, "hangs"), ("", "runs"))
    with pytest.raises(SetupError) as caught:
        boots.run(kvm=False, cpus=cpus)
    assert len(boots.ids()) == 3
    assert boots.said.count(BOOTING) == 3
    first, remedy, *console = str(caught.value).splitlines()
    assert "Linux 7.2.13 (/boot/vmlinuz-7.2.13) panicked in each of 3 boots" in first
    assert "Oops: int3: 0000 [#1] SMP NOPTI at sched_clock_cpu+0x9/0x230" in first
    assert "--kernel VERSION" in remedy
    assert ("--cpus 1" in remedy) == (cpus == 2)
    assert "".join(f"{line}\n" for line in console) == f"{OOPS[:-1]} (ndpy explain setup)\n"


def test_a_machine_that_ends_without_a_panic_is_not_booted_again(boots):
    boots.add(("qemu-system-x86_64: no such machine\n", "ends"), ("", "runs"))
    with pytest.raises(SetupError, match="no such machine"):
        boots.run(kvm=False)
    assert len(boots.ids()) == 1


def test_a_panic_after_the_command_began_does_not_run_it_twice(boots):
    boots.add((WARNING, "begins"), ("", "runs"))
    outcome = boots.run(kvm=False)
    assert (outcome.status, outcome.broken) == (None, True)
    assert "of the command's making" in outcome.console
    assert len(boots.ids()) == 1


def test_a_kernel_that_locks_up_is_ended_before_the_limit_of_the_command(boots, monkeypatch):
    monkeypatch.setattr(vm, "_LOOK_FOR_LOCKUP_S", 0.1)
    boots.add((WARNING, "locks"))
    start = time.monotonic()
    outcome = boots.run(kvm=False)
    assert time.monotonic() - start < 8
    assert (outcome.status, outcome.broken, outcome.timed_out) == (None, True, False)
    line = "soft lockup - CPU#1 stuck for 130s! [python:314]"
    assert outcome.reason == f"the kernel does not go on, so the VM was ended: {line}"
    assert not any(psutil.pid_exists(number) for number in boots.ids())


def test_a_panic_is_no_sign_against_kvm(boots, monkeypatch):
    monkeypatch.setattr(kvm, "works", lambda qemu: True)
    monkeypatch.setattr(kvm, "remember", lambda qemu, answer: pytest.fail("the answer was changed"))
    boots.add((PANIC, "ends"), ("", "runs"))
    assert boots.run(kvm=True).status == 0
    assert boots.said.count("booting Linux 7.2.13 with KVM") == 2


def test_bytes_that_are_no_text_reach_the_command(boots, monkeypatch, tmp_path):
    monkeypatch.setenv("NDPY_ODD", os.fsdecode(b"\xfe\xff"))
    boots.add(("", "runs"))
    command = ["sh", "-c", 'printf "%s|" "$NDPY_ODD" "$1"', "sh", os.fsdecode(b"caf\xe9 'x'")]
    vm.run(command, vm.Machine(kvm=False), 10, boots.said.append)
    # What the VM would run.
    done = subprocess.run(["sh", tmp_path / "command"], capture_output=True, timeout=30)
    assert done.stdout == b"\xfe\xff|caf\xe9 'x'|", done
