"""What `ndpy doctor` says of GPUs, where tests/machines has no machine of that kind."""

from __future__ import annotations

import pytest
from kit import linux_only as linux_only

from ndpy.tools.doctor.findings import Verdict
from ndpy.tools.doctor.linux_gpu import examine_gpus
from ndpy.vocabulary import system_files

GPU = "sys/bus/pci/devices/0000:42:00.0"


@pytest.fixture
def machine(tmp_path):
    """write(path, text): a file of the machine, which has one GPU."""

    def write(path, text=""):
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{text}\n")

    write(f"{GPU}/vendor", "0x10de")
    write(f"{GPU}/class", "0x030200")
    with system_files.below(tmp_path):
        yield write


def findings():
    return {finding.check: finding for finding in examine_gpus()}


def test_without_the_driver_nothing_else_is_examined(machine):
    (finding,) = findings().values()
    assert (finding.check, finding.verdict) == ("GPU driver", Verdict.WARN)
    assert "the 1 GPU of this machine" in finding.message
    assert "modprobe nvidia" in finding.remedy


@pytest.mark.parametrize(("path", "value"), [("vendor", "0x1002"), ("class", "0x068000")])
def test_what_is_not_a_gpu_of_the_maker_is_not_examined(machine, path, value):
    machine(f"{GPU}/{path}", value)
    assert findings() == {}


def test_the_module_for_peer_memory_suffices(machine):
    machine("sys/module/nvidia/refcnt")
    assert findings()["GPU memory"].verdict is Verdict.WARN
    machine("sys/module/nvidia_peermem/refcnt")
    finding = findings()["GPU memory"]
    assert finding.verdict is Verdict.PASS
    assert "module for peer memory" in finding.message


def test_a_container_is_told_what_to_do_outside(machine):
    machine("sys/module/nvidia/refcnt")
    assert "nvidia-modprobe" in findings()["GPU files"].remedy
    machine(".dockerenv")
    found = findings()
    assert "docker run --gpus all" in found["GPU files"].remedy
    assert found["GPU memory"].remedy.startswith("on the host, as root: modprobe nvidia_peermem")
    machine("dev/nvidiactl")
    assert findings()["GPU files"].verdict is Verdict.PASS


@pytest.mark.parametrize("text", ["", "nonsense\n", "0x0 0x0 0x0\n0x10 zz 0x0"])
def test_a_file_that_says_nothing_breaks_nothing(machine, text):
    machine("sys/module/nvidia/refcnt")
    machine(f"{GPU}/resource", text)
    finding = findings()[f"GPU {GPU[-12:]}"]
    assert (finding.verdict, "does not say" in finding.message) == (Verdict.WARN, True)


@pytest.mark.parametrize(("kind", "verdict"), [("DMA", "WARN"), ("DMA-FQ", "WARN"), ("identity", "PASS")])
def test_a_translating_iommu_is_named(machine, kind, verdict):
    machine("sys/module/nvidia/refcnt")
    machine(f"{GPU}/iommu_group/type", kind)
    assert findings()["GPU IOMMU"].verdict.value == verdict
