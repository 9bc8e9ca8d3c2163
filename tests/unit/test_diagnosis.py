"""The findings of `ndpy doctor`, on this machine and on faked ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from faked_machine import FILES, KERNEL, make_info, named, on, one, says, verdicts
from kit import linux_only as linux_only
from kit.compiling import compiled

import ndpy
import ndpy.tools.doctor
from ndpy import problems
from ndpy.platforms.verbs import device_files, distribution
from ndpy.tools.cli import main
from ndpy.tools.doctor import linux, linux_drivers, linux_system, recording
from ndpy.tools.doctor.findings import Finding, Verdict, examine, examine_apart, passed
from ndpy.vocabulary import system_files

ROOT = Path(__file__).resolve().parent.parent.parent


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
    says(one(examine_apart("check", "examined", "look")), "FAIL", "SIGSEGV")


def test_a_library_that_ends_the_process_is_a_finding_with_its_last_words(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import os; os.write(2, b'no firmware'); os._exit(3)")
    says(one(examine_apart("check", "examined", "look")), "FAIL", ("status 3", "no firmware"))


def test_a_library_that_crashes_at_the_end_of_the_process_is_a_finding(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import atexit, os; atexit.register(os.abort); return [passed('a', 'b')]")
    first, second = examine_apart("check", "examined", "look")
    assert first == passed("a", "b")
    assert second.verdict is Verdict.FAIL
    assert "was ended by SIGABRT after its answer" in second.message


def test_a_hang_of_what_is_examined_is_a_finding(tmp_path, monkeypatch):
    module(tmp_path, monkeypatch, "import time; time.sleep(60)")
    says(one(examine_apart("check", "examined", "look", limit_s=1.0)), "FAIL", "within 1 s")


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
    findings = json.loads(done.stdout)
    for finding in findings:
        assert list(finding) == ["check", "verdict", "message", "remedy", "problem"]
        assert all(isinstance(value, str) for value in finding.values())
        assert finding["verdict"] in ("PASS", "WARN", "FAIL")
        assert finding["verdict"] != "PASS" or finding["remedy"] == finding["problem"] == ""
        assert finding["problem"] in ("", *(each.word for each in problems.all_problems()))
    return done.returncode, findings


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
    assert found["problem"] == "no-library"


def build(source: str, path: Path) -> Path:
    path.with_suffix(".c").write_text(source)
    return compiled(path, "-shared", "-fPIC", path.with_suffix(".c"))


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
    says(one(ndpy.tools.doctor.diagnose()), "FAIL", remedy="install")


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
        says(one(linux_drivers.examine_unlisted(listed, device_files.all_files(), "")), "WARN")
        says(one(linux_drivers.examine_unlisted(listed, device_files.all_files(), "bnxt_re0")), "FAIL")
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


# Adapters and ports.


def gid(index: int, address: str, kind: str = "RoCE v2") -> ndpy.vocabulary.info.Gid:
    return ndpy.vocabulary.info.Gid(index, bytes(16), kind, address)


def port(**changes) -> ndpy.vocabulary.info.PortInfo:
    values = {
        "number": 1, "state": "active", "link_layer": "Ethernet", "mtu": 4096, "max_mtu": 4096, "lid": 0,
        "netdev": "eth0",
        "gids": (gid(0, "fe80::1"), gid(1, "192.0.2.1")),
    }  # fmt: skip
    return ndpy.vocabulary.info.PortInfo(**(values | changes))


def adapter(*ports, **changes) -> ndpy.AdapterInfo:
    values = {"transport": "RoCE", "addresses": ("192.0.2.1",), "ports": ports, "port": 1, "asked_for": ""}
    return make_info(capabilities=ndpy.Capability.RELIABLE_CONNECTIONS, **(values | changes))


def examined(tree, *ports, **changes):
    root = tree({"sys/class/net/eth0/mtu": "1500\n"})
    return on(root, lambda: linux.examine_adapter(adapter(*ports, **changes)))


def test_a_good_adapter_passes(tree):
    assert verdicts(examined(tree, port())) == {"PASS"}


def test_an_ethernet_mtu_of_1500_is_warned_with_both_numbers(tree):
    found = says(named(examined(tree, port(mtu=1024)), "mlx5_0 port 1 MTU"), "WARN", ("1024", "1500"))
    assert found.remedy.startswith("ip link set eth0 mtu 4200")


def test_a_small_mtu_that_is_the_ports_largest_passes(tree):
    says(named(examined(tree, port(mtu=1024, max_mtu=1024)), "mlx5_0 port 1 MTU"), "PASS")


@pytest.mark.parametrize(
    ("gids", "words"),
    [
        ((), "no GID at all"),
        ((gid(0, "fe80::1"),), "none is routable"),
        ((gid(0, "192.0.2.1", "RoCE v1"), gid(1, "fe80::1")), "no routable GID of RoCE v2"),
    ],
)
def test_gids_that_routers_do_not_forward_are_warned(tree, gids, words):
    says(named(examined(tree, port(gids=gids)), "mlx5_0 port 1 GIDs"), "WARN", words)


def test_iwarp_needs_an_address_beyond_the_link(tree):
    good = examined(tree, port(), transport="iWARP")
    bad = examined(tree, port(), transport="iWARP", addresses=("fe80::1%eth0",))
    says(named(good, "mlx5_0 port 1 GIDs"), "PASS")
    says(named(bad, "mlx5_0 port 1 GIDs"), "WARN")


def test_a_netdev_in_another_namespace_is_told(tree):
    says(named(examined(tree, port(netdev=None)), "mlx5_0 port 1 GIDs"), "WARN", "namespace")


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
    says(named(examined(tree, port(state="down", link_layer=layer)), "mlx5_0 port 1"), "WARN", remedy=words)


@pytest.mark.parametrize(("node", "said"), [(None, "no NUMA node"), (0, "on NUMA node 0")])
def test_where_an_adapter_is_placed_is_said(tree, node, said):
    found = named(examined(tree, port(), numa_node=node), "mlx5_0 placement")
    assert said in found.message


def test_an_adapter_on_a_node_that_this_process_may_not_use_is_warned(tree):
    tree({"sys/devices/system/node/node0/cpulist": "100000-100001\n"})
    says(named(examined(tree, port(), numa_node=0), "mlx5_0 placement"), "WARN", remedy="numactl --cpunodebind=0")
