"""The faults of tests/mutants/logic fit the sources and name tests that exist. `make mutants LOGIC=1` runs them."""

import sys
from collections import Counter
from pathlib import Path

import pytest

MUTANTS = Path(__file__).parents[1] / "mutants"
if not MUTANTS.is_dir() or not (MUTANTS.parents[1] / "softrdma").is_dir():
    pytest.skip("the tests of a wheel have no sources", allow_module_level=True)
sys.path.append(str(MUTANTS))
try:
    import faults
finally:
    sys.path.remove(str(MUTANTS))

FAULTS = faults.read_faults()


def test_every_fault_still_applies():
    """Its lines stand in its file exactly once. If a change has moved them, write the fault anew; see
    tests/mutants/README.md.
    """
    problems = []
    for fault in FAULTS:
        try:
            assert fault.mutated() != (faults.ROOT / fault.file).read_text(encoding="utf-8")
        except (ValueError, OSError) as error:
            problems.append(str(error))
    assert not problems, "\n".join(problems)


def test_every_fault_names_tests_that_exist():
    missing = [f"{fault.name}: {test}" for fault in FAULTS for test in fault.tests if not faults.is_a_test(test)]
    assert not missing, "\n".join(missing)
    assert all(fault.tests for fault in FAULTS)


def test_each_kind_and_each_area_has_its_faults():
    kinds, areas = Counter(fault.kind for fault in FAULTS), Counter(fault.area for fault in FAULTS)
    few = [f"{name}: {kinds[name]}" for name in faults.KINDS if kinds[name] < faults.LEAST_OF_EACH]
    few += [f"{name}: {areas[name]}" for name in faults.AREAS if areas[name] < faults.LEAST_OF_EACH]
    assert not few
    assert len(FAULTS) >= faults.LEAST
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_a_fault_whose_lines_are_gone_or_ambiguous_is_refused(tmp_path):
    head = "kind: once\narea: core\nfile: tests/mutants/faults.py\ntests: a.py::b\nwhat: x\n\n"
    for name, lines, found in (("gone", "-nothing like this", 0), ("twice", "-", 2)):
        path = tmp_path / f"{name}.fault"
        path.write_text(f"{head}{lines}\n+something\n")
        fault = faults.read_fault(path)
        with pytest.raises(ValueError, match="not once" if found != 1 else ""):
            fault.mutated()
    path.write_text(head + "no minus\n")
    with pytest.raises(ValueError, match="begins with"):
        faults.read_fault(path)
