"""What the files of a release say about themselves: version, description, addresses and licences."""

from __future__ import annotations

import re
import subprocess
import tarfile
from pathlib import Path

import pytest
from environments import PROVIDED, ROOT, contents, metadata, output_of
from kit.helpers import only_under_stress
from trove_classifiers import classifiers

import ndpy

if not PROVIDED:
    pytest.skip("needs what rig/setup.sh provides", allow_module_level=True)

TOOLS = ROOT / ".venv/bin"
# The release is built for the first test.
pytestmark = pytest.mark.timeout(420)


def every_file(release) -> list[Path]:
    wheels = [release.linux, release.freethreaded, release.windows, *release.others]
    return [release.sdist, *(wheel for wheel in wheels if wheel is not None)]


def test_an_index_takes_each_file_without_a_warning(release):
    output = output_of(TOOLS / "twine", "check", "--strict", *every_file(release))
    assert output.count("PASSED") == len(every_file(release)), output


@only_under_stress
def test_pyroma_has_nothing_to_say(release):
    output = output_of(TOOLS / "pyroma", "--min=10", release.sdist)
    assert "Final rating: 10/10" in output, output


def test_the_version_stands_in_one_place(release):
    """Pages of the documentation show what commands print, with numbers that tests/docs compares loosely."""
    tracked = subprocess.run(
        ["git", "grep", "-lFI", ndpy.__version__, "--", ":!tests", ":!docs"], cwd=ROOT, capture_output=True, text=True
    )
    if tracked.returncode > 1:
        pytest.skip("not a git checkout")
    named = {
        name
        for name in tracked.stdout.split()
        if re.search(rf"(?<![\d.]){re.escape(ndpy.__version__)}(?![\d.])", (ROOT / name).read_text())
    }
    assert named == {"ndpy/__init__.py", "CHANGELOG.md"}
    for path in every_file(release):
        assert path.name.split("-")[1].removesuffix(".tar.gz") == ndpy.__version__
    for wheel in every_file(release)[1:]:
        assert metadata(wheel)["Version"] == ndpy.__version__


def test_classifiers_exist_and_name_each_python_that_is_served(release):
    found = metadata(release.linux).get_all("Classifier")
    assert set(found) <= classifiers
    assert found == sorted(found)
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 15)} <= set(found)


def test_an_address_that_is_a_placeholder_is_one_of_the_projects_addresses(release):
    """So a release needs a change of pyproject.toml, and `git grep ndpy.invalid` finds all the others."""
    addresses = [line.partition(", ")[2] for line in metadata(release.linux).get_all("Project-URL")]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} == {
        line.partition(", ")[0] for line in metadata(release.linux).get_all("Project-URL")
    }
    found = subprocess.run(
        ["git", "grep", "-ohI", r"https://ndpy\.invalid[^] )\">]*", "--", ":!tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if found.returncode > 1:
        pytest.skip("not a git checkout")
    assert [each for each in found.stdout.split() if not each.startswith(tuple(addresses))] == []


def test_each_file_has_the_licences_of_what_is_in_it(release):
    names = ["LICENSE", "THIRD_PARTY_LICENSES.txt"]
    for wheel in every_file(release)[1:]:
        assert metadata(wheel)["License-Expression"] == "MIT"
        assert metadata(wheel).get_all("License-File") == names
        inside = contents(wheel)
        for name in names:
            (held,) = [data for path, data in inside.items() if path.endswith(f".dist-info/licenses/{name}")]
            assert held == (ROOT / name).read_bytes()
    with tarfile.open(release.sdist) as archive:
        assert {f"{release.sdist.name.removesuffix('.tar.gz')}/{name}" for name in names} <= set(archive.getnames())


def test_all_code_of_others_in_softnd_is_named(release, tmp_path):
    """Linked again, with a list of the libraries from which the linker takes code."""
    objects = sorted((ROOT / "softrdma/build/windows").rglob("*.o"))
    linked, said = tmp_path / "softnd.dll", tmp_path / "map"
    libraries = ("-lws2_32", "-lmswsock", "-liphlpapi")
    output_of(
        "x86_64-w64-mingw32-gcc", "-shared", "-static-libgcc", "-o", linked, *objects,
        ROOT / "softrdma/networkdirect/softnd.def", *libraries, f"-Wl,-Map={said}",
    )  # fmt: skip
    taken = set(re.findall(r"lib(\w+)\.a\(", said.read_text())) | set(
        re.findall(r"/(\w*crt\w*\.o)\b", said.read_text())
    )
    imports = {"kernel32", "msvcrt", "ws2_32", "mswsock", "iphlpapi"}
    assert taken - imports == {"gcc", "mingw32", "mingwex", "dllcrt2.o", "crtbegin.o", "crtend.o"}
    text = (ROOT / "THIRD_PARTY_LICENSES.txt").read_text()
    assert "MinGW-w64 (Zope Public License 2.1" in text
    assert "GCC Runtime Library Exception 3.1" in text


# Of the reports in HTML.
OWN_PAGE = {"ndpy/tools/page/page.js", "ndpy/tools/page/page.css"}


def test_no_wheel_has_a_library_or_a_font_of_others(release):
    for wheel in every_file(release)[1:]:
        foreign = [
            name for name in set(contents(wheel)) - OWN_PAGE
            if not re.match(r"(ndpy/|pytest_ndpy\.py$|ndpy-[\d.]+\.(dist-info|data)/)", name)
            or re.search(r"\.(ttf|otf|woff2?|js|css)$", name)
        ]  # fmt: skip
        assert foreign == []


def test_a_wheel_brings_the_man_pages_of_each_command(release):
    pages = {path.name for path in (ROOT / "share/man/man1").iterdir()}
    assert "ndpy.1" in pages
    for wheel in every_file(release)[1:]:
        inside = {name.partition(".data/data/")[2] for name in contents(wheel)}
        assert {f"share/man/man1/{name}" for name in pages} <= inside
