"""The decision to use KVM. That QEMU starts with KVM proves little."""

import shutil
import sys

import psutil
import pytest
from kit import linux_only as linux_only

from ndpy.tools.machines import kvm, vm


@pytest.fixture
def qemu():
    path = shutil.which("qemu-system-x86_64")
    if path is None:
        pytest.skip("needs qemu-system-x86_64")
    return path


@pytest.fixture
def tries(monkeypatch, tmp_path):
    """The answers of the tries. Each try takes one from the list. /dev/kvm can be opened."""
    answers = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kvm, "_DEVICE", "/dev/null")
    monkeypatch.setattr(kvm, "_try", lambda qemu: answers.pop(0))
    return answers


def test_the_program_ends_where_instructions_run_at_speed(qemu, monkeypatch):
    monkeypatch.setattr(kvm, "_LIMIT_S", 60.0)
    assert kvm._try(qemu, ("tcg",))


def test_a_qemu_whose_program_does_not_end_is_given_up_and_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(kvm, "_LIMIT_S", 0.5)
    slow = tmp_path / "qemu"
    slow.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/id\nexec sleep 60\n")
    slow.chmod(0o755)
    assert not kvm._try(str(slow))
    assert not psutil.pid_exists(int((tmp_path / "id").read_text()))


def test_a_qemu_that_only_starts_is_not_enough(tmp_path):
    """The stand-in ends with status 0 or 1, as QEMU does when it cannot use KVM."""
    for status in (0, 1):
        fake = tmp_path / f"qemu{status}"
        fake.write_text(f"#!/bin/sh\nexit {status}\n")
        fake.chmod(0o755)
        assert not kvm._try(str(fake))


@pytest.mark.parametrize("answer", [True, False])
def test_the_answer_is_remembered_until_the_machine_starts_anew(tries, tmp_path, monkeypatch, answer):
    tries += [answer, not answer]
    assert kvm.works(sys.executable) is answer
    assert kvm.works(sys.executable) is answer
    assert len(tries) == 1

    (tmp_path / "boot_id").write_text("another boot\n")
    monkeypatch.setattr(kvm, "_BOOT_ID", tmp_path / "boot_id")
    assert kvm.works(sys.executable) is not answer


def test_another_qemu_is_another_question(tries, tmp_path):
    tries += [True, False]
    other = tmp_path / "qemu"
    other.touch()
    assert kvm.works(sys.executable)
    assert not kvm.works(str(other))


def test_an_answer_that_cannot_be_kept_or_read_is_found_out_again(tries, tmp_path, monkeypatch):
    tries += [True, True, False]
    blocked = tmp_path / "a file"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert kvm.works(sys.executable)
    assert kvm.works(sys.executable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ndpy").mkdir()
    (tmp_path / "ndpy/kvm").write_bytes(b"\xff\xfe")
    assert not kvm.works(sys.executable)
    assert tries == []


@pytest.fixture
def boots(monkeypatch):
    """Every boot with KVM fails. The list shows how each boot was tried."""
    seen = []

    def run_once(command, machine, limit_s, quick, environment, place, merged):
        seen.append(quick)
        if quick:
            raise vm._BootError("no word from the kernel")
        return vm.Outcome(0)

    monkeypatch.setattr(vm, "_run_once", run_once)
    monkeypatch.setattr(vm.tools, "missing", lambda programs: {})
    monkeypatch.setattr(vm.tools, "find", lambda program: sys.executable)
    monkeypatch.setattr(vm.tools, "find_kernel", lambda *arguments: vm.tools.Kernel("6.1", "vmlinuz"))
    return seen


def test_a_boot_that_fails_with_kvm_is_the_last_one_with_it(tries, boots):
    tries.append(True)
    for _ in range(2):
        assert vm.run(["true"], vm.Machine(), 10, lambda line: None).status == 0
    assert boots == [True, False, False]


@pytest.mark.parametrize("machine", [vm.Machine(kvm=False), vm.Machine(icount=True)])
def test_kvm_is_not_even_tried_where_it_is_not_wanted(tries, boots, machine):
    assert vm.run(["true"], machine, 10, lambda line: None).status == 0
    assert boots == [False]
