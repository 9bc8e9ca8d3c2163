"""The findings of `ndpy doctor`, on this machine and on faked ones."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import ndpy
import ndpy.tools.doctor
from ndpy.tools.cli import main
from ndpy.tools.doctor.findings import Finding, Verdict, examine, examine_apart, passed
from ndpy.vocabulary import system_files

if sys.platform != "linux":
    pytest.skip("the machines faked here are Linux's", allow_module_level=True)

from ndpy.platforms.verbs import device_files, distribution
from ndpy.tools.doctor import linux, linux_drivers, linux_system, recording
from ndpy.tools.doctor.linux_system import examine_control_groups

ROOT = Path(__file__).resolve().parent.parent.parent
KERNEL = "6.1.0-test"
STATUS = "Name:\tpython\nVmLck:\t       0 kB\nVmPin:\t      64 kB\nCapEff:\t{capabilities:016x}\n"
WHOLE_MACHINE = "         0          0 4294967295\n"
IPC_LOCK = 1 << 14


@pytest.fixture
def tree(tmp_path):
    """Make files below a root. Returns the root."""

    def make(files: dict[str, str], root: Path = tmp_path) -> Path:
        for name, text in {"proc/sys/kernel/osrelease": KERNEL, **files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    return make


def on(root: Path, examination) -> list[Finding]:
    """What is found on the machine with these files."""
    with system_files.below(root):
        return list(examination())


def one(findings) -> Finding:
    (finding,) = findings
    return finding


def named(findings, check: str) -> Finding:
    return one([finding for finding in findings if finding.check == check])


def verdicts(findings) -> set[str]:
    return {finding.verdict.value for finding in findings}


# Findings, and examinations in a process of their own.


@pytest.mark.parametrize(("verdict", "remedy"), [(Verdict.PASS, "x"), (Verdict.WARN, ""), (Verdict.FAIL, "")])
def test_a_remedy_comes_with_everything_but_a_pass(verdict, remedy):
    with pytest.raises(ValueError):
        Finding("check", verdict, "message", remedy)


def test_an_examination_that_breaks_is_a_finding():
    found = one(examine("the check", lambda: 1 // 0))
    assert (found.check, found.verdict) == ("the check", Verdict.WARN)
    assert "ZeroDivisionError" in found.message


def module(tmp_path, monkeypatch, body: str) -> None:
    (tmp_path / "examined.py").write_text(
        f"from ndpy.tools.doctor.findings import passed\ndef look(*arguments):\n    {body}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_an_examination_apart_answers_with_its_findings(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "return [passed('a', repr(arguments) + ' \u00e4')]")
    assert examine_apart("check", "examined", "look", "x", "y") == [passed("a", "('x', 'y') \u00e4")]


def test_a_crash_of_what_is_examined_is_a_finding(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = one(examine_apart("check", "examined", "look"))
    assert found.verdict is Verdict.FAIL
    assert "SIGSEGV" in found.message


def test_a_library_that_ends_the_process_is_a_finding_with_its_last_words(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import os; os.write(2, b'no firmware'); os._exit(3)")
    found = one(examine_apart("check", "examined", "look"))
    assert found.verdict is Verdict.FAIL
    assert "status 3" in found.message
    assert "no firmware" in found.message


def test_a_library_that_crashes_at_the_end_of_the_process_is_a_finding(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import atexit, os; atexit.register(os.abort); return [passed('a', 'b')]")
    first, second = examine_apart("check", "examined", "look")
    assert first == passed("a", "b")
    assert second.verdict is Verdict.FAIL
    assert "was ended by SIGABRT after its answer" in second.message


def test_a_hang_of_what_is_examined_is_a_finding(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import time; time.sleep(60)")
    found = one(examine_apart("check", "examined", "look", limit_s=1.0))
    assert found.verdict is Verdict.FAIL
    assert "within 1 s" in found.message


def test_what_the_libraries_print_is_a_warning(tmp_path, monkeypatch):
    module(
        tmp_path, monkeypatch, "import sys; print('libibverbs: Warning: x', file=sys.stderr); return [passed('a', 'b')]"
    )
    first, second = examine_apart("check", "examined", "look")
    assert first.verdict is Verdict.PASS
    assert (second.verdict, second.message) == (Verdict.WARN, "libibverbs: Warning: x")


# Libraries, real and missing.


def test_the_optional_symbols_are_those_that_the_header_marks():
    header = (ROOT / "cdefs/verbs/ibverbs.h").read_text() + (ROOT / "cdefs/verbs/rdmacm.h").read_text()
    assert set(linux.OPTIONAL) == set(re.findall(r"(\w+)\([^;]*\);\s*/\* optional", header))


def doctor(**environment: str) -> tuple[int, list[dict[str, str]]]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NDPY_")}
    done = subprocess.run(
        [sys.executable, "-m", "ndpy", "doctor", "--json"],
        cwd=ROOT,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def failures(findings: list[dict[str, str]]) -> dict[str, dict[str, str]]:
    return {finding["check"]: finding for finding in findings if finding["verdict"] == "FAIL"}


@pytest.mark.parametrize(("variable", "check"), [("NDPY_LIBIBVERBS", "libibverbs"), ("NDPY_LIBRDMACM", "librdmacm")])
def test_a_missing_library_fails_and_names_the_package(variable, check):
    status, findings = doctor(**{variable: "/nonexistent/library.so.1"})
    assert status == 1
    found = failures(findings)[check]
    assert "/nonexistent/library.so.1" in found["message"]
    # test_distributions.py has what this is on each distribution.
    assert found["remedy"].startswith(distribution.read().install(check))
    assert variable in found["remedy"]


def build(source: str, path: Path) -> Path:
    path.with_suffix(".c").write_text(source)
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", path, path.with_suffix(".c")], check=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return path


def test_a_library_without_its_symbols_fails(tmp_path):
    status, findings = doctor(NDPY_LIBIBVERBS=str(build("int nothing;\n", tmp_path / "libempty.so")))
    assert status == 1
    assert "no symbol ibv_" in failures(findings)["symbols"]["message"]


def test_a_library_that_crashes_when_it_is_loaded_does_not_crash_the_doctor(tmp_path):
    source = "#include <stdlib.h>\n__attribute__((constructor)) static void crash(void) { abort(); }\n"
    status, findings = doctor(NDPY_LIBIBVERBS=str(build(source, tmp_path / "libcrash.so")))
    assert status == 1
    assert "SIGABRT" in failures(findings)["libraries"]["message"]
    assert "SIGABRT" in failures(findings)["adapters"]["message"]
    assert "locked memory" in {finding["check"] for finding in findings}


def test_without_the_extension_module_the_remedy_is_to_install():
    code = "import sys; sys.modules['ndpy._verbs'] = None; from ndpy.tools.cli import main; main(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    found = failures(json.loads(done.stdout))["ndpy"]
    assert "extension module" in found["message"]
    assert found["remedy"].startswith("install ndpy with pip")


def test_an_import_that_fails_is_a_finding(monkeypatch):
    monkeypatch.delattr(ndpy.tools.doctor, "linux")
    monkeypatch.setitem(sys.modules, "ndpy.tools.doctor.linux", None)
    found = one(ndpy.tools.doctor.diagnose())
    assert found.verdict is Verdict.FAIL
    assert "install" in found.remedy


def test_a_machine_without_rdma_fails_with_remedies():
    if any(Path("/sys/class/infiniband").glob("*")):
        pytest.skip("this machine has an adapter")
    status, findings = doctor()
    assert status == 1
    found = failures(findings)
    assert "ndpy softroce" in found["adapters"]["remedy"]
    assert all(finding["remedy"] for finding in findings if finding["verdict"] != "PASS")
    for name in ("ib_uverbs", "rdma_ucm"):
        if linux_system.module_state(name) != "loaded":
            assert f"modprobe {name}" in found[f"module {name}"]["remedy"]


def test_an_adapter_asked_for_in_the_environment_and_absent_fails():
    status, findings = doctor(NDPY_ADAPTER="mlx5_77")
    assert status == 1
    assert "mlx5_77" in failures(findings)["NDPY_ADAPTER"]["message"]


def test_the_table_has_all_that_the_json_has(monkeypatch):
    findings = [passed("one", "is well"), Finding("two", Verdict.WARN, "is odd", "turn it off and on again")]
    monkeypatch.setattr("ndpy.tools.doctor.diagnose", lambda adapter: findings)
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0
    for words in ("PASS", "one", "is well", "WARN", "two", "is odd", "remedy: turn it off and on again"):
        assert words in result.output
    assert result.output.splitlines()[-1] == "doctor: 2 PASS, 1 WARN, 0 FAIL"


def test_the_machine_is_recorded_in_a_file_or_on_standard_output(monkeypatch, tmp_path):
    monkeypatch.setattr("ndpy.tools.doctor.diagnose", lambda adapter: [passed("one", "is well")])
    monkeypatch.setattr("ndpy.tools.doctor.record", lambda: "device mlx5_0\n")
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    file = tmp_path / "this.machine"
    result = CliRunner().invoke(main, ["doctor", "--record", str(file)])
    assert (result.exit_code, file.read_text()) == (0, "device mlx5_0\n")
    assert "is well" in result.stdout
    result = CliRunner().invoke(main, ["doctor", "--record", "-"])
    assert (result.exit_code, result.stdout) == (0, "device mlx5_0\n")
    assert "is well" in result.stderr
    assert CliRunner().invoke(main, ["doctor", "--record", str(tmp_path / "absent/x")]).exit_code == 2
    assert CliRunner().invoke(main, ["doctor", "--record", "-", "--json"]).exit_code == 2


def test_only_linux_is_recorded(monkeypatch):
    monkeypatch.setattr(ndpy.tools.doctor.sys, "platform", "win32")
    with pytest.raises(ndpy.UnsupportedError):
        ndpy.tools.doctor.record()


def test_an_empty_tree_is_recorded(tree):
    with system_files.below(tree({})):
        lines = recording.record().splitlines()
    assert f"file /proc/sys/kernel/osrelease = {KERNEL.partition('-')[0]}" in lines
    assert not [line for line in lines if line.startswith(("device", "interface", "file /dev"))]


# Drivers and modules, in faked trees.


def test_drivers_are_listed(tree):
    root = tree({"etc/libibverbs.d/mlx5.driver": "driver mlx5\n", "usr/lib64/libibverbs/libmlx5-rdmav34.so": ""})
    assert "mlx5" in one(on(root, linux.examine_drivers)).message


def test_a_driver_without_its_library_is_warned(tree):
    root = tree({"etc/libibverbs.d/mlx5.driver": "driver mlx5\n", "etc/libibverbs.d/own.driver": "driver /opt/own\n"})
    found = one(on(root, linux.examine_drivers))
    assert found.verdict is Verdict.WARN
    assert "mlx5" in found.message
    assert "/opt/own" not in found.message


def test_no_driver_at_all_names_the_package(tree):
    found = one(on(tree({"etc/os-release": "ID=debian\n"}), linux.examine_drivers))
    assert found.verdict is Verdict.WARN
    assert "apt-get install libibverbs1 ibverbs-providers" in found.remedy


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"sys/module/ib_uverbs/refcnt": "0"}, "loaded"),
        ({"sys/class/infiniband_verbs/abi_version": "6"}, "loaded"),
        ({f"lib/modules/{KERNEL}/modules.builtin": "kernel/drivers/infiniband/core/ib_uverbs.ko\n"}, "loaded"),
        ({f"lib/modules/{KERNEL}/modules.dep": "kernel/drivers/infiniband/core/ib_uverbs.ko.xz: x.ko\n"}, "available"),
        ({f"lib/modules/{KERNEL}/modules.dep": "kernel/other.ko: kernel/core/ib_uverbs.ko.xz\n"}, "absent"),
        ({}, "absent"),
    ],
)
def test_the_state_of_a_module(tree, files, state):
    with system_files.below(tree(files)):
        assert linux_system.module_state("ib_uverbs") == state


def test_a_module_that_is_there_only_needs_loading(tree):
    root = tree({f"lib/modules/{KERNEL}/modules.dep": "core/ib_uverbs.ko:\ncore/rdma_ucm.ko:\n"})
    found = named(on(root, linux_system.examine_modules), "module ib_uverbs")
    assert (found.verdict, found.remedy) == (Verdict.FAIL, "as root: modprobe ib_uverbs")


def test_a_module_that_is_absent_needs_a_package(tree):
    found = named(on(tree({"etc/os-release": "ID=ubuntu\n"}), linux_system.examine_modules), "module rdma_ucm")
    assert found.verdict is Verdict.FAIL
    assert f"linux-modules-extra-{KERNEL}" in found.remedy


def test_in_a_container_modules_are_the_hosts(tree):
    found = named(on(tree({".dockerenv": ""}), linux_system.examine_modules), "module rdma_ucm")
    assert found.remedy.startswith("on the host, as root: modprobe rdma_ucm")


# Device files.


ADAPTER = {"sys/class/infiniband/mlx5_0/node_type": "1: CA", "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0"}
FILES = {"dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": ""}


def test_device_files_that_can_be_opened_pass(tree):
    findings = on(tree({**ADAPTER, **FILES}), linux_system.examine_device_files)
    assert [finding.check for finding in findings] == ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]
    assert verdicts(findings) == {"PASS"}


def test_a_device_file_that_may_not_be_opened_fails(tree):
    if os.geteuid():
        pytest.skip("only root can become another user")
    # Other users cannot enter pytest's folders.
    with tempfile.TemporaryDirectory() as folder:
        root = tree({**ADAPTER, **FILES}, Path(folder))
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o666)
        (root / "dev/infiniband/uverbs0").chmod(0o600)
        os.seteuid(65534)
        try:
            findings = on(root, linux_system.examine_device_files)
        finally:
            os.seteuid(0)
    found = named(findings, "/dev/infiniband/uverbs0")
    assert found.verdict is Verdict.FAIL
    assert "65534" in found.message
    assert "udev" in found.remedy
    assert named(findings, "/dev/infiniband/rdma_cm").verdict is Verdict.PASS


def test_without_device_files_a_container_needs_them_given(tree):
    found = one(on(tree({**ADAPTER, ".dockerenv": ""}), linux_system.examine_device_files))
    assert found.verdict is Verdict.FAIL
    assert "--device=/dev/infiniband" in found.remedy


def test_without_device_files_a_machine_with_an_adapter_needs_modules(tree):
    files = {"sys/class/infiniband/mlx5_0/node_type": "1: CA"}
    found = one(on(tree(files), linux_system.examine_device_files))
    assert found.verdict is Verdict.FAIL
    assert "mlx5_0" in found.message
    assert "modprobe -a ib_uverbs rdma_ucm" in found.remedy


def test_without_device_files_although_the_modules_are_loaded_dev_needs_them(tree):
    found = one(on(tree({**ADAPTER, "sys/module/rdma_ucm/refcnt": "0"}), linux_system.examine_device_files))
    assert found.verdict is Verdict.FAIL
    assert "modprobe" not in found.remedy and "PrivateDevices=no" in found.remedy


HOST_OF_EIGHT = {f"sys/class/infiniband/mlx5_{i}/node_type": "1: CA" for i in range(8)} | {
    f"sys/class/infiniband_verbs/uverbs{i}/ibdev": f"mlx5_{i}" for i in range(8)
}
POD = {
    **HOST_OF_EIGHT,
    "proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1\0",
    "dev/infiniband/uverbs3": "",
    "dev/infiniband/rdma_cm": "",
}


def refuse(monkeypatch, numbers: dict[str, int]) -> None:
    """Let opening the device files of these names fail, as for a user or in a control group without the right."""
    opens = system_files.refusal

    def refusal(place: Path) -> OSError | None:
        number = numbers.get(place.name)
        return opens(place) if number is None else OSError(number, os.strerror(number))

    monkeypatch.setattr(system_files, "refusal", refusal)


def test_what_a_pod_was_given_passes_and_what_belongs_to_others_is_a_remark(tree):
    findings = on(tree(POD), linux_system.examine_device_files)
    assert [finding.check for finding in findings] == [
        "/dev/infiniband/uverbs3",
        "other adapters",
        "/dev/infiniband/rdma_cm",
    ]
    assert verdicts(findings) == {"PASS"}
    assert "mlx5_0, mlx5_1, mlx5_2, mlx5_4, mlx5_5, mlx5_6, mlx5_7" in named(findings, "other adapters").message


def test_files_that_a_control_group_forbids_belong_to_others(tree, monkeypatch):
    refuse(monkeypatch, {f"uverbs{i}": errno.EPERM for i in range(8) if i != 3})
    files = {f"dev/infiniband/uverbs{i}": "" for i in range(8)}
    findings = on(tree({**POD, **files}), linux_system.examine_device_files)
    assert verdicts(findings) == {"PASS"}
    assert "mlx5_7" in named(findings, "other adapters").message


def test_without_a_file_that_opens_those_that_a_control_group_forbids_are_failures(tree, monkeypatch):
    refuse(monkeypatch, {f"uverbs{i}": errno.EPERM for i in range(8)})
    files = {f"dev/infiniband/uverbs{i}": "" for i in range(8)}
    findings = on(tree({**HOST_OF_EIGHT, **FILES, **files}), linux_system.examine_device_files)
    assert named(findings, "/dev/infiniband/uverbs7").verdict is Verdict.FAIL
    assert "DeviceAllow=" in named(findings, "/dev/infiniband/uverbs7").remedy


def test_files_that_this_user_may_not_open_are_a_warning_beside_one_that_it_may(tree, monkeypatch):
    refuse(monkeypatch, {f"uverbs{i}": errno.EACCES for i in range(8) if i != 3})
    files = {f"dev/infiniband/uverbs{i}": "" for i in range(8)}
    findings = on(tree({**POD, **files}), linux_system.examine_device_files)
    assert named(findings, "/dev/infiniband/uverbs0").verdict is Verdict.WARN
    assert named(findings, "/dev/infiniband/uverbs3").verdict is Verdict.PASS


@pytest.mark.parametrize("which", ["mlx5_5", "mlx5_5:1"])
def test_an_adapter_of_others_that_is_named_fails_alone(tree, which):
    findings = on(tree(POD), lambda: linux_system.examine_device_files(which))
    assert [finding.check for finding in findings] == ["/dev/infiniband/uverbs5", "/dev/infiniband/rdma_cm"]
    found = named(findings, "/dev/infiniband/uverbs5")
    assert found.verdict is Verdict.FAIL
    assert "resources" in found.remedy and "modprobe" not in found.remedy


def test_a_broken_device_file_fails_beside_one_that_opens(tree, monkeypatch):
    refuse(monkeypatch, {"uverbs5": errno.EIO})
    findings = on(tree({**POD, "dev/infiniband/uverbs5": ""}), linux_system.examine_device_files)
    assert named(findings, "/dev/infiniband/uverbs5").verdict is Verdict.FAIL
    assert "dmesg" in named(findings, "/dev/infiniband/uverbs5").remedy


def test_a_container_is_told_to_take_its_own_device_only(tree):
    findings = on(tree({**ADAPTER, ".dockerenv": ""}), linux_system.examine_device_files)
    assert one(findings).remedy == "docker run --device=/dev/infiniband/uverbs0 --device=/dev/infiniband/rdma_cm"
    several = on(tree({**HOST_OF_EIGHT, ".dockerenv": ""}), linux_system.examine_device_files)
    assert "--device=/dev/infiniband/uverbsN " in one(several).remedy
    assert "uverbs7 is mlx5_7" in one(several).remedy


def test_a_container_without_rdma_cm_is_told_to_take_it(tree):
    findings = on(tree({**ADAPTER, ".dockerenv": "", "dev/infiniband/uverbs0": ""}), linux_system.examine_device_files)
    assert named(findings, "/dev/infiniband/rdma_cm").remedy == "docker run --device=/dev/infiniband/rdma_cm"


def test_why_an_adapter_that_is_asked_for_is_not_listed(tree):
    with system_files.below(tree(POD)):
        assert "mlx5_5" not in device_files.why_unlisted("mlx5_3")
        said = device_files.why_unlisted("mlx5_5")
        assert "/dev/infiniband/uverbs5" in said and "resources" in said
        assert device_files.why_unlisted("mlx5_9") == ""


# What libibverbs lists.


MISFIT = (
    "libibverbs: Warning: Driver bnxt_re does not support the kernel ABI of {kernel} (supports 1 to 6) for device "
    "/sys/class/infiniband/bnxt_re0\n"
)


def list_with(monkeypatch, printed: str, devices: list[str]) -> linux_drivers.Listed:
    """List devices while the library prints to standard error."""

    def device_names() -> list[str]:
        os.write(2, printed.encode())
        return devices

    monkeypatch.setattr(linux_drivers, "device_names", device_names)
    return linux_drivers.list_devices()


def of_bnxt(tree) -> Path:
    files = {"sys/class/infiniband/bnxt_re0/node_type": "1: CA", "sys/class/infiniband_verbs/uverbs0/ibdev": "bnxt_re0"}
    return tree({**files, **FILES, "etc/os-release": "ID=debian\n"})


@pytest.mark.parametrize(("kernel", "which"), [(8, "is newer than"), (0, "is older than")])
def test_a_driver_for_another_abi_is_told_with_the_numbers(tree, monkeypatch, kernel, which):
    with system_files.below(of_bnxt(tree)):
        listed = list_with(monkeypatch, MISFIT.format(kernel=kernel), [])
        found = one(linux_drivers.examine_unlisted(listed, device_files.all_files(), ""))
    assert (found.check, found.verdict) == ("bnxt_re0", Verdict.FAIL)
    assert "bnxt_re knows versions 1 to 6" in found.message and f"which has version {kernel}" in found.message
    assert which in found.remedy and "apt-get install" not in found.remedy


def test_a_driver_for_another_abi_is_a_warning_beside_an_adapter_that_works(tree, monkeypatch):
    with system_files.below(of_bnxt(tree)):
        listed = list_with(monkeypatch, MISFIT.format(kernel=8), ["mlx5_0"])
        assert one(linux_drivers.examine_unlisted(listed, device_files.all_files(), "")).verdict is Verdict.WARN
        assert one(linux_drivers.examine_unlisted(listed, device_files.all_files(), "bnxt_re0")).verdict is Verdict.FAIL
        assert list(linux_drivers.examine_unlisted(listed, device_files.all_files(), "mlx5_0")) == []


def test_a_driver_that_does_not_fit_a_device_of_another_driver_is_nothing(tree, monkeypatch, capfd):
    with system_files.below(of_bnxt(tree)):
        listed = list_with(monkeypatch, MISFIT.format(kernel=8) + "other words\n", ["bnxt_re0"])
        assert list(linux_drivers.examine_unlisted(listed, device_files.all_files(), "")) == []
    # What is not understood is left to the reader.
    assert capfd.readouterr().err == "other words\n"


def test_a_libibverbs_for_another_kernel_is_told(tree, monkeypatch):
    words = "libibverbs: Fatal: kernel ABI version 7 doesn't match library version 6.\n"
    with system_files.below(of_bnxt(tree)):
        listed = list_with(monkeypatch, words, [])
    assert listed.general is not None
    assert "version 6" in listed.general[0] and "version 7" in listed.general[0]


def test_only_rdma_cm_is_no_adapter(tree):
    findings = on(tree({"dev/infiniband/rdma_cm": ""}), linux_system.examine_device_files)
    assert named(findings, "device files").verdict is Verdict.FAIL
    assert named(findings, "/dev/infiniband/rdma_cm").verdict is Verdict.PASS


def test_a_missing_rdma_cm_names_its_module(tree):
    findings = on(tree({**ADAPTER, "dev/infiniband/uverbs0": ""}), linux_system.examine_device_files)
    found = named(findings, "/dev/infiniband/rdma_cm")
    assert found.verdict is Verdict.FAIL
    assert "modprobe rdma_ucm" in found.remedy


# Locked memory.


def memlock(tree, soft: object, hard: object, capabilities: int = 0, uid_map: str = WHOLE_MACHINE) -> Finding:
    limits = f"Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {soft}  {hard}  bytes\n"
    root = tree(
        {
            "proc/self/limits": limits,
            "proc/self/status": STATUS.format(capabilities=capabilities),
            "proc/self/uid_map": uid_map,
        }
    )
    return one(on(root, linux_system.examine_memlock))


@pytest.mark.parametrize(
    ("soft", "verdict"), [("unlimited", "PASS"), (1 << 32, "PASS"), (8 << 20, "WARN"), (65536, "FAIL"), (0, "FAIL")]
)
def test_the_verdict_on_the_limit_of_locked_memory(tree, soft, verdict):
    assert memlock(tree, soft, "unlimited").verdict.value == verdict


def test_too_little_lockable_memory_says_how_much_is_pinned_and_the_remedy(tree):
    found = memlock(tree, 65536, 8 << 20)
    assert "RLIMIT_MEMLOCK is 64 KiB" in found.message
    assert "64 KiB are pinned" in found.message
    assert "8192 KiB" in found.remedy
    for words in ("ulimit -l", "limits.conf", "LimitMEMLOCK=", "--ulimit memlock=-1"):
        assert words in found.remedy


def test_a_process_with_the_capability_is_exempt(tree):
    assert memlock(tree, 65536, 65536, IPC_LOCK).verdict is Verdict.PASS


def test_the_capability_of_a_user_namespace_is_no_exemption(tree):
    assert memlock(tree, 65536, 65536, IPC_LOCK, "0 1000 1\n").verdict is Verdict.FAIL


def test_without_proc_there_is_a_finding_all_the_same(tree):
    assert one(on(tree({}), linux_system.examine_memlock)).verdict is Verdict.WARN


# Open files.


def nofile(tree, soft: object, hard: object, taken: int = 4) -> Finding:
    limits = {"proc/self/limits": f"Max open files            {soft}                 {hard}               files\n"}
    descriptors = {f"proc/self/fd/{number}": "" for number in range(taken)}
    return one(on(tree({**limits, **descriptors}), linux_system.examine_nofile))


@pytest.mark.parametrize(
    ("soft", "taken", "verdict"),
    [
        ("unlimited", 4, "PASS"),
        (1024, 4, "PASS"),
        (256, 4, "WARN"),
        (64, 4, "WARN"),
        (16, 4, "FAIL"),
        (1024, 1020, "FAIL"),
    ],
)
def test_the_verdict_on_the_limit_of_open_files(tree, soft, taken, verdict):
    assert nofile(tree, soft, "unlimited", taken).verdict.value == verdict


def test_too_few_open_files_say_how_many_are_taken_and_the_remedy(tree):
    found = nofile(tree, 64, 4096)
    assert "RLIMIT_NOFILE is 64, of which 4 are taken" in found.message
    assert "may go to 4096" in found.remedy
    for words in ("ulimit -n", "limits.conf", "LimitNOFILE=", "--ulimit nofile="):
        assert words in found.remedy


def test_without_proc_nothing_is_said_of_open_files(tree):
    assert one(on(tree({}), linux_system.examine_nofile)).verdict is Verdict.WARN


def test_the_limit_of_open_files_is_told_of_this_process():
    assert "RLIMIT_NOFILE" in one(linux_system.examine_nofile()).message


# Control groups.


def test_without_limits_all_control_groups_pass(tree):
    files = {"proc/self/cgroup": "0::/user.slice\n"}
    files |= {f"sys/fs/cgroup/user.slice/{name}": "max\n" for name in ("rdma.max", "pids.max", "memory.max")}
    findings = on(tree(files), examine_control_groups)
    assert len(findings) == 3
    assert verdicts(findings) == {"PASS"}


def test_a_limit_of_a_group_above_counts(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/pids.max": "max\n",
            "sys/fs/cgroup/a/pids.max": "100\n",
            "sys/fs/cgroup/a/pids.current": "95\n",
        }
    )
    found = named(on(root, examine_control_groups), "pids control group")
    assert found.verdict is Verdict.WARN
    assert "95 of at most 100" in found.message
    assert "/sys/fs/cgroup/a/pids.max" in found.remedy


def test_version_1_has_a_tree_for_each_controller(tree):
    root = tree(
        {
            "proc/self/cgroup": "8:pids:/\n5:memory:/jobs/7\n3:cpu,cpuacct:/x\n0::/\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": str(256 << 20),
            "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes": str(200 << 20),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
            "sys/fs/cgroup/pids/pids.max": "100000",
            "sys/fs/cgroup/pids/pids.current": "7",
        }
    )
    findings = on(root, examine_control_groups)
    found = named(findings, "memory control group")
    assert found.verdict is Verdict.WARN
    assert "200 MiB of at most 256 MiB" in found.message
    assert named(findings, "pids control group").message == "7 of at most 100000 of threads in use"


def test_a_path_of_the_hosts_in_a_container_leads_to_what_is_there(tree):
    root = tree(
        {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/pids.max": "10", "sys/fs/cgroup/pids.current": "1"}
    )
    assert "1 of at most 10" in named(on(root, examine_control_groups), "pids control group").message


@pytest.mark.parametrize(
    ("current", "verdict"), [("hca_handle=1 hca_object=5", "WARN"), ("hca_handle=2 hca_object=5", "FAIL")]
)
def test_limits_of_rdma_objects_are_told(tree, current, verdict):
    root = tree(
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/rdma.max": "mlx5_0 hca_handle=2 hca_object=max\n",
            "sys/fs/cgroup/job/rdma.current": f"mlx5_0 {current}\n",
        }
    )
    found = named(on(root, examine_control_groups), "rdma control group")
    assert found.verdict.value == verdict
    assert "mlx5_0" in found.message
    assert "of at most 2 open adapters" in found.message
    assert "/sys/fs/cgroup/job/rdma.max" in found.remedy


def test_limits_of_the_adapters_of_others_are_nothing(tree):
    limits = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/rdma.max": "mlx5_0 hca_handle=0 hca_object=0\nmlx5_3 hca_handle=4 hca_object=max\n",
    }
    findings = [one for one in on(tree({**POD, **limits}), examine_control_groups) if one.check == "rdma control group"]
    assert [finding.message for finding in findings] == ["mlx5_3: 0 of at most 4 open adapters are in use"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "raise /sys/fs/cgroup/pids.max"),
        ({".dockerenv": ""}, "docker run --pids-limit="),
        ({"proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1"}, "podPidsLimit"),
    ],
)
def test_a_limit_is_raised_where_it_was_set(tree, files, words):
    limits = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/pids.max": "10\n", "sys/fs/cgroup/pids.current": "9\n"}
    found = named(on(tree({**files, **limits}), examine_control_groups), "pids control group")
    assert found.remedy.startswith(("raise", "docker run")) and words in found.remedy


# Huge pages and containers.


@pytest.mark.parametrize(("total", "free", "verdict"), [(0, 0, "PASS"), (16, 3, "PASS"), (16, 0, "WARN")])
def test_huge_pages(tree, total, free, verdict):
    text = f"MemTotal: 1 kB\nHugePages_Total: {total}\nHugePages_Free: {free}\nHugepagesize: 2048 kB\n"
    assert one(on(tree({"proc/meminfo": text}), linux_system.examine_huge_pages)).verdict.value == verdict


@pytest.mark.parametrize(
    "files",
    [
        {".dockerenv": ""},
        {"run/.containerenv": ""},
        {"proc/1/environ": "PATH=/bin\0container=lxc\0"},
        {"proc/self/cgroup": "0::/system.slice/docker/2\n"},
    ],
)
def test_a_container_is_told_what_it_lacks(tree, files):
    limits = {"proc/self/limits": "Max locked memory         65536 65536 bytes\n"}
    found = one(on(tree(files | limits), linux_system.examine_container))
    assert found.verdict is Verdict.WARN
    assert "--device=/dev/infiniband" in found.remedy
    assert "--ulimit memlock=-1" in found.remedy


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/kubepods/pod1/2\n"},
        {"proc/1/environ": "PATH=/bin\0KUBERNETES_SERVICE_HOST=10.0.0.1\0"},
        {"proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1\0"},
        {"var/run/secrets/kubernetes.io/serviceaccount/token": ""},
    ],
)
def test_a_pod_is_told_what_it_lacks(tree, files):
    limits = {"proc/self/limits": "Max locked memory         65536 65536 bytes\n"}
    found = one(on(tree(files | limits), linux_system.examine_container))
    assert found.verdict is Verdict.WARN
    assert "resources" in found.remedy and "LimitMEMLOCK=infinity" in found.remedy
    assert "docker" not in found.remedy


def test_a_container_that_was_given_everything_passes(tree):
    files = {".dockerenv": "", "proc/self/limits": "Max locked memory  unlimited unlimited bytes\n", **FILES}
    assert one(on(tree(files), linux_system.examine_container)).verdict is Verdict.PASS


def test_an_empty_tree_breaks_nothing(tree):
    findings = on(tree({}), linux_system.examine_system)
    assert not [finding for finding in findings if "could not be examined" in finding.message]


def test_nonsense_in_every_file_breaks_nothing(tree):
    names = (
        "proc/self/limits", "proc/self/status", "proc/self/cgroup", "proc/self/uid_map", "proc/meminfo", "proc/1/environ",
        "sys/fs/cgroup/pids.max", "sys/fs/cgroup/rdma.max", "etc/libibverbs.d/x.driver",
    )  # fmt: skip
    root = tree(dict.fromkeys(names, "\x00:=: \n::\nmax =\n"))
    checks = {finding.check for finding in on(root, linux_system.examine_system)}
    assert {"locked memory", "open files", "huge pages", "container"} <= checks


# Adapters and ports.


def gid(index: int, address: str, kind: str = "RoCE v2") -> ndpy.vocabulary.info.Gid:
    return ndpy.vocabulary.info.Gid(index, bytes(16), kind, address)


def port(**changes) -> ndpy.vocabulary.info.PortInfo:
    values = {
        "number": 1, "state": "active", "link_layer": "Ethernet", "mtu": 4096, "max_mtu": 4096, "lid": 0, "netdev": "eth0",
        "gids": (gid(0, "fe80::1"), gid(1, "192.0.2.1")),
    }  # fmt: skip
    return ndpy.vocabulary.info.PortInfo(**(values | changes))


def adapter(*ports, **changes) -> ndpy.AdapterInfo:
    values = dict.fromkeys(ndpy.AdapterInfo.__dataclass_fields__, 0)
    values |= {"name": "mlx5_0", "transport": "RoCE", "addresses": ("192.0.2.1",), "numa_node": None, "ports": ports}
    values |= {"capabilities": ndpy.Capability.RELIABLE_CONNECTIONS, "port": 1, "asked_for": ""}
    return ndpy.AdapterInfo(**(values | changes))


def examined(tree, *ports, **changes):
    root = tree({"sys/class/net/eth0/mtu": "1500\n"})
    return on(root, lambda: linux.examine_adapter(adapter(*ports, **changes)))


def test_a_good_adapter_passes(tree):
    assert verdicts(examined(tree, port())) == {"PASS"}


def test_an_ethernet_mtu_of_1500_is_warned_with_both_numbers(tree):
    found = named(examined(tree, port(mtu=1024)), "mlx5_0 port 1 MTU")
    assert found.verdict is Verdict.WARN
    assert "1024" in found.message
    assert "1500" in found.message
    assert found.remedy.startswith("ip link set eth0 mtu 4200")


def test_a_small_mtu_that_is_the_ports_largest_passes(tree):
    assert named(examined(tree, port(mtu=1024, max_mtu=1024)), "mlx5_0 port 1 MTU").verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("gids", "words"),
    [
        ((), "no GID at all"),
        ((gid(0, "fe80::1"),), "none is routable"),
        ((gid(0, "192.0.2.1", "RoCE v1"), gid(1, "fe80::1")), "no routable GID of RoCE v2"),
    ],
)
def test_gids_that_routers_do_not_forward_are_warned(tree, gids, words):
    found = named(examined(tree, port(gids=gids)), "mlx5_0 port 1 GIDs")
    assert found.verdict is Verdict.WARN
    assert words in found.message


def test_iwarp_needs_an_address_beyond_the_link(tree):
    good = examined(tree, port(), transport="iWARP")
    bad = examined(tree, port(), transport="iWARP", addresses=("fe80::1%eth0",))
    assert named(good, "mlx5_0 port 1 GIDs").verdict is Verdict.PASS
    assert named(bad, "mlx5_0 port 1 GIDs").verdict is Verdict.WARN


def test_a_netdev_in_another_namespace_is_told(tree):
    found = named(examined(tree, port(netdev=None)), "mlx5_0 port 1 GIDs")
    assert found.verdict is Verdict.WARN
    assert "namespace" in found.message


@pytest.mark.parametrize(
    ("layer", "flags", "words"),
    [
        ("Ethernet", "0x1002", "ip link set eth0 up"),
        ("Ethernet", "0x1003", "check the cable"),
        ("Ethernet", "", "check the cable"),
        ("InfiniBand", "0x1003", "subnet manager"),
    ],
)
def test_a_port_that_is_down_says_how_it_comes_up(tree, layer, flags, words):
    """An interface that was brought up and has no link needs a cable."""
    tree({"sys/class/net/eth0/flags": f"{flags}\n"})
    found = named(examined(tree, port(state="down", link_layer=layer)), "mlx5_0 port 1")
    assert found.verdict is Verdict.WARN
    assert words in found.remedy


@pytest.mark.parametrize(
    ("own", "above", "tightest"),
    [((10, 4), (20, 18), "a/"), ((10, 8), (20, 12), "a/b/"), ((10, 4), (10, 4), "a/b/"), ((30, 0), (20, 1), "a/")],
)
def test_of_the_limits_on_the_way_up_the_one_with_least_room_is_named(tree, own, above, tightest):
    """Each pair is (limit, in use): for the process's own control group, and for the one above it."""
    files = {"proc/self/cgroup": "0::/a/b\n"}
    for folder, (limit, used) in (("a/b", own), ("a", above)):
        files |= {
            f"sys/fs/cgroup/{folder}/pids.max": f"{limit}\n",
            f"sys/fs/cgroup/{folder}/pids.current": f"{used}\n",
            f"sys/fs/cgroup/{folder}/rdma.max": f"mlx5_0 hca_handle={limit}\n",
            f"sys/fs/cgroup/{folder}/rdma.current": f"mlx5_0 hca_handle={used}\n",
        }
    findings = on(tree(files), examine_control_groups)
    limit, used = own if tightest == "a/b/" else above
    rdma = named(findings, "rdma control group")
    assert f"{used} of at most {limit} " in rdma.message
    assert f"/sys/fs/cgroup/{tightest}rdma.max" in rdma.remedy
    assert f"{used} of at most {limit} " in named(findings, "pids control group").message


@pytest.mark.parametrize(("node", "said"), [(None, "no NUMA node"), (0, "on NUMA node 0")])
def test_where_an_adapter_is_placed_is_said(tree, node, said):
    found = named(examined(tree, port(), numa_node=node), "mlx5_0 placement")
    assert said in found.message


def test_an_adapter_on_a_node_that_this_process_may_not_use_is_warned(tree):
    tree({"sys/devices/system/node/node0/cpulist": "100000-100001\n"})
    found = named(examined(tree, port(), numa_node=0), "mlx5_0 placement")
    assert found.verdict is Verdict.WARN
    assert "numactl --cpunodebind=0" in found.remedy
