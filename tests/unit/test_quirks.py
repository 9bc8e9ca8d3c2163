"""The table of quirks. Nothing else in ndpy knows the drivers' names."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ndpy
from ndpy.vocabulary import quirks
from ndpy.vocabulary.quirks import Quirk

PACKAGE = Path(ndpy.__file__).parent
# It makes such adapters. There a driver's name is that of a kernel module.
MAKERS = "tools/machines/"
NAMES = {"rdma_rxe", "rxe", "siw", "softnd", "softnd.dll", "iWARP"}
# It asks whether the adapter is this package's own, which makes faults itself.
OWN = {"testing/session.py"}
WAITING = {
    "platforms/verbs/adapter.py",
    "platforms/verbs/memory.py",
}


def adapter(driver: str, transport: str) -> Any:
    return SimpleNamespace(driver=driver, transport=transport)


def comparisons(source: str) -> list[str]:
    """The lines where a program compares the name of a driver or a transport as text.

    That is a comparison of AdapterInfo.driver, or with one of the names. An executor of faults is not a driver.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare):
            continue
        if ast.unparse(node.left).endswith("executor"):
            continue
        for part in ast.walk(node):
            name = part.attr == "driver" if isinstance(part, ast.Attribute) else False
            if name or (isinstance(part, ast.Constant) and part.value in NAMES):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
                break
    return found


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(PACKAGE.rglob("*.py")) if MAKERS not in path.as_posix()],
    ids=lambda path: path.relative_to(PACKAGE).as_posix(),
)
def test_only_the_table_knows_the_drivers_by_name(path):
    name = path.relative_to(PACKAGE).as_posix()
    if name in ("vocabulary/quirks.py", "tools/cli/vm.py"):
        return
    found = comparisons(path.read_text(encoding="utf-8"))
    assert not found or name in WAITING | OWN, found


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('info.driver == "rdma_rxe"', 1),
        ('adapter.info.transport != "iWARP"', 1),
        ('driver in ("mlx5_core", "siw")', 1),
        ("Quirk.SIW_OVERTAKES_READS in adapter._quirks", 0),
        ('{"iWARP": ", or a firewall"}.get(info.transport, "")', 0),
        ('transport = "iWARP"', 0),
        ('self._executor == "softnd"', 0),
    ],
)
def test_the_checker_sees_comparisons(source, count):
    assert len(comparisons(source)) == count


@pytest.mark.parametrize("quirk", list(Quirk), ids=lambda quirk: quirk.name)
def test_each_entry_is_somebodys_and_says_what_and_where(quirk):
    entry = quirk.value
    assert bool(entry.driver) is not bool(entry.transport)
    prefix = {"rdma_rxe": "RXE_", "siw": "SIW_", "iWARP": "IWARP_"}[entry.driver or entry.transport]
    assert quirk.name.startswith(prefix)
    assert entry.summary and entry.reference
    assert not entry.summary.endswith(".")


def test_an_adapter_has_the_entries_of_its_driver_and_of_its_transport():
    on_siw = quirks.quirks_of(adapter("siw", "iWARP"))
    assert {Quirk.SIW_OVERTAKES_READS, Quirk.IWARP_MANAGER_ONLY} < on_siw
    assert Quirk.RXE_WINDOW_BOUNDS not in on_siw
    assert quirks.quirks_of(adapter("mlx5_core", "RoCE")) == frozenset()


def test_users_are_spared_on_kernels_too_that_nobody_looked_at():
    assert Quirk.RXE_FLUSHES_ITS_OWN_FAULT in quirks.quirks_of(adapter("rdma_rxe", "RoCE"), "6.6.1")
    quirk = Quirk.RXE_FLUSHES_ITS_OWN_FAULT.value
    assert quirk.workaround
    assert quirk not in quirks.known("rdma_rxe", "6.6.1")
    assert quirk in quirks.known("rdma_rxe", "6.12.1")


@pytest.mark.parametrize(
    ("release", "known", "past"),
    [
        ("6.1.9", False, False),
        ("6.2.0", True, False),
        ("6.5.17-generic", True, False),
        ("6.6.0", False, True),
        ("7", False, True),
    ],
)
def test_an_entry_holds_for_the_kernels_from_the_first_to_the_last(release, known, past):
    entry = quirks.Facts("it is odd", "somewhere", driver="some", first=(6, 2), last=(6, 5))
    assert (entry.is_in(release), entry.is_past(release)) == (known, past)


@pytest.mark.parametrize(
    ("release", "version"), [("6.1.0-50-amd64", (6, 1, 0)), ("6.12.107+deb13", (6, 12, 107)), ("7", (7,)), ("odd", ())]
)
def test_kernel_versions(release, version):
    assert quirks.kernel_version(release) == version
