"""Machines of files, and what `ndpy doctor` finds on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ndpy.tools.doctor.findings import Finding
from ndpy.vocabulary import system_files

KERNEL = "6.1.0-test"
ADAPTER = {"sys/class/infiniband/mlx5_0/node_type": "1: CA", "sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_0"}
FILES = {"dev/infiniband/uverbs0": "", "dev/infiniband/rdma_cm": ""}


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


def says(
    finding: Finding, verdict: str, message: str | tuple[str, ...] = (), remedy: str | tuple[str, ...] = ()
) -> Finding:
    """Assert that a finding has this verdict and these words. Returns it."""
    assert finding.verdict.value == verdict, finding
    for text, words in ((finding.message, message), (finding.remedy, remedy)):
        for word in [words] if isinstance(words, str) else words:
            assert word in text
    return finding
