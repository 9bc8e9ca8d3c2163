"""`ndpy doctor` on a machine that has an adapter."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from kit.helpers import has_kernel_driver, only_under_stress, require_kernel_driver

# A machine may lack these although nothing is wrong with its adapter.
TOLERATED = {
    "container",
    "huge pages",
    "locked memory",
    "open files",
    "pids control group",
    "memory control group",
    "libraries",
}


@pytest.fixture(scope="module")
def findings(adapter_name) -> dict[str, dict[str, str]]:
    clean = {name: value for name, value in os.environ.items() if name != "NDPY_ADAPTER"}
    done = subprocess.run(
        [sys.executable, "-m", "ndpy", "doctor", "--json"],
        env={**clean, "NDPY_ADAPTER": adapter_name},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    return {finding["check"]: finding for finding in json.loads(done.stdout)}


def test_a_machine_with_a_good_adapter_passes(findings, adapter_name):
    others = [finding for check, finding in findings.items() if check not in TOLERATED]
    assert not [finding for finding in others if finding["verdict"] != "PASS"]


def test_the_adapter_its_port_and_its_files_are_there(findings, adapter, adapter_name):
    require_kernel_driver(adapter, "modules, device files and limits that doctor could examine")
    wanted = {
        "libibverbs",
        "librdmacm",
        "symbols",
        "drivers",
        "module ib_uverbs",
        "module rdma_ucm",
        "fork",
        adapter_name,
    }
    wanted |= {f"{adapter_name} port 1", f"{adapter_name} port 1 GIDs", f"{adapter_name} placement", "NDPY_ADAPTER"}
    wanted |= {"/dev/infiniband/rdma_cm", "locked memory", "open files", "rdma control group", "huge pages"}
    assert wanted <= set(findings)
    assert any(check.startswith("/dev/infiniband/uverbs") for check in findings)


def test_an_adapter_without_a_kernel_driver_is_all_that_is_examined(findings, adapter, adapter_name):
    if has_kernel_driver(adapter):
        pytest.skip(f"{adapter_name} has a kernel driver")
    assert {adapter_name, "NDPY_ADAPTER"} <= set(findings)
    assert not [check for check in findings if check.startswith(("lib", "module", "/dev", "locked"))]


def test_the_libraries_paths_are_told(findings, adapter):
    require_kernel_driver(adapter, "libraries of the system")
    assert "/libibverbs.so.1" in findings["libibverbs"]["message"]
    assert "/librdmacm.so.1" in findings["librdmacm"]["message"]


@only_under_stress
def test_the_paths_mtu_of_1024_of_an_ethernet_of_1500_is_warned(adapter):
    """On a software adapter, since nobody else uses its interface."""
    netdev = adapter.info.netdev
    if adapter.info.driver != "rdma_rxe" or os.geteuid():
        pytest.skip("only root changes the MTU, and only of rxe's interface")
    with open(f"/sys/class/net/{netdev}/mtu") as file:
        before = file.read().strip()
    subprocess.run(["ip", "link", "set", netdev, "mtu", "1500"], check=True, timeout=30)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "ndpy", "doctor", "--json"], capture_output=True, text=True, timeout=100
        )
    finally:
        subprocess.run(["ip", "link", "set", netdev, "mtu", before], check=True, timeout=30)
    found = {finding["check"]: finding for finding in json.loads(done.stdout)}[f"{adapter.info.name} port 1 MTU"]
    assert found["verdict"] == "WARN"
    assert "1024" in found["message"]
    assert "1500" in found["message"]
    assert done.returncode == 0
