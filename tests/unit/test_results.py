"""The table of tested kernels, from the result files of `make test-kernels`."""

import datetime
import sys
from pathlib import Path

import pytest
from kit.rig import RIG

sys.path.insert(0, str(RIG))

import results as rig_results

sys.path.remove(str(RIG))

DAY = datetime.date(2026, 11, 23)
README = f"""# A program

{rig_results.BEGIN}
{rig_results.HEAD[0]}
{rig_results.HEAD[1]}

The end.
"""


def results(folder: Path, suite: str, version: str, **attributes: int) -> None:
    text = " ".join(f'{name}="{value}"' for name, value in attributes.items())
    with (folder / "kernels").open("a") as kernels:
        kernels.write(f"{suite} {version} /somewhere/{version}\n")
    (folder / f"{version}-smoke.xml").write_text('<testsuite tests="96" failures="0" errors="0" skipped="4"/>')
    (folder / f"{version}-contract.xml").write_text(f"<testsuites><testsuite {text}/></testsuites>")


def table(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| ") and "Debian" in line]


def test_each_kernel_has_a_row_with_its_counts(tmp_path):
    results(tmp_path, "unstable", "7.2.13", tests=600, failures=1, errors=1, skipped=8)
    results(tmp_path, "stable", "6.12.113", tests=600, failures=0, errors=0, skipped=0)
    made = rig_results.replace_table(README, rig_results.rows(tmp_path, DAY))
    assert table(made) == [
        "| 6.12.113 | Debian stable | 92 passed, 4 skipped | 600 passed | 2026-11-23 |",
        "| 7.2.13 | Debian unstable | 92 passed, 4 skipped | 590 passed, **2 failed**, 8 skipped | 2026-11-23 |",
    ]
    assert made.startswith("# A program\n") and made.endswith("|\n\nThe end.\n")


def test_a_run_that_ended_early_says_so(tmp_path):
    results(tmp_path, "testing", "7.2.12", tests=1)
    (tmp_path / "7.2.12-contract.xml").unlink()
    assert rig_results.rows(tmp_path, DAY) == {
        "testing": "| 7.2.12 | Debian testing | 92 passed, 4 skipped | did not run | 2026-11-23 |"
    }


def test_rows_of_other_suites_stay(tmp_path):
    former = README
    for number, suite in enumerate(["stable", "unstable", "stable"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        results(folder, suite, f"9.{number}", tests=1)
        former = rig_results.replace_table(former, rig_results.rows(folder, DAY))
    assert [row.split()[1] for row in table(former)] == ["9.2", "9.1"]


def test_a_readme_without_the_table_is_refused():
    with pytest.raises(SystemExit, match="no line"):
        rig_results.replace_table("# A program\n", {})
