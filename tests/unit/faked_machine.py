"""Machines without an adapter: their files, what `ndpy doctor` finds on them, and what an adapter says about itself."""

from __future__ import annotations

from pathlib import Path

import pytest

import ndpy
from ndpy.tools.doctor.findings import Finding
from ndpy.vocabulary import system_files

KERNEL = "6.1.0-test"
ADAPTER = {"sys/class/infiniband/mlx5_0/node_type": "1: CA", "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0"}
FILES = {"dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": ""}


@pytest.fixture
def tree(tmp_path):
    """Make files below a root. Returns the root."""

    def make(files: dict[str, str | bytes], root: Path = tmp_path) -> Path:
        for name, content in {"proc/sys/kernel/osrelease": KERNEL, **files}.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return root

    return make


@pytest.fixture
def no_adapter(monkeypatch):
    """As on a machine without an adapter."""
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    monkeypatch.setattr("ndpy.list_adapters", lambda **_: [])
    monkeypatch.setattr("ndpy.platforms.list_adapters", lambda **_: [])


def make_info(**changes) -> ndpy.AdapterInfo:
    values = dict.fromkeys(ndpy.AdapterInfo.__dataclass_fields__, 0)
    values |= {"name": "mlx5_0", "capabilities": ndpy.Capability.NONE, "ports": (), "addresses": (), "numa_node": None}
    return ndpy.AdapterInfo(**(values | changes))


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


def says(
    finding: Finding, verdict: str, message: str | tuple[str, ...] = (), remedy: str | tuple[str, ...] = ()
) -> Finding:
    """Assert that a finding has this verdict and these words. Returns it."""
    assert finding.verdict.value == verdict, finding
    for text, words in ((finding.message, message), (finding.remedy, remedy)):
        for word in [words] if isinstance(words, str) else words:
            assert word in text
    return finding
