"""The files of a release. They are made once. Each wheel is installed into an empty environment and runs there.

The checkout is on no path of these environments. Their dependencies are those that the wheel's metadata names.
"""

from __future__ import annotations

import re
import shutil
import tarfile
import venv
from pathlib import Path

import pytest
from environments import (
    FREE_THREADED,
    OTHERS,
    PLACE,
    PROVIDED,
    ROOT,
    SOFTND,
    WINDOWS_PYTHON,
    contents,
    installed_softnd,
    metadata,
    output_of,
    run,
    version_of,
    windows,
)
from kit.helpers import STRESS, only_under_stress
from packaging.utils import parse_wheel_filename

if not PROVIDED:
    pytest.skip("needs what rig/setup.sh provides", allow_module_level=True)

VERBS_MODULE = "ndpy/_verbs.abi3.so"
WINDOWS_MODULE = "ndpy/_networkdirect.pyd"
# The modules of the registration cache.
LINUX_CORE, WINDOWS_CORE = "ndpy/_core.abi3.so", "ndpy/_core.pyd"
SOFTVERBS = "ndpy/platforms/verbs/soft/libsoftverbs.so"
SHIM = "ndpy/platforms/verbs/soft/libndpyfaults.so"
# They bring in softverbs under the names by which programs load it.
NAMED_BY_PROGRAMS = ["ndpy/platforms/verbs/soft/libibverbs.so.1", "ndpy/platforms/verbs/soft/librdmacm.so.1"]
MOST_OF_SOFTVERBS = 320 << 10
# The libraries of Windows itself, and the interpreter's python3.dll.
WINDOWS_LIBRARIES = {"kernel32.dll", "msvcrt.dll", "ws2_32.dll", "mswsock.dll", "iphlpapi.dll", "python3.dll"}
OBJDUMP = "x86_64-w64-mingw32-objdump"


# Five files of a release are built for the first test, which takes minutes on a busy machine.
pytestmark = pytest.mark.timeout(420)


def test_wheels_carry_the_code_of_their_own_platform_and_are_the_same_otherwise(release):
    linux, windows = contents(release.linux), contents(release.windows)
    assert linux.keys() - windows.keys() == {VERBS_MODULE, LINUX_CORE, SOFTVERBS, SHIM, *NAMED_BY_PROGRAMS}
    assert windows.keys() - linux.keys() == {WINDOWS_MODULE, WINDOWS_CORE, SOFTND}
    differing = {name.rpartition("/")[2] for name in linux.keys() & windows.keys() if linux[name] != windows[name]}
    assert differing == {"WHEEL", "RECORD"}
    assert {
        "ndpy/py.typed",
        "ndpy/_core.pyi",
        "ndpy/tools/machines/guest.sh",
        "ndpy/tools/cli/smoke/checks/windows.py",
    } <= linux.keys()


def test_wheels_are_tagged_for_every_python_from_3_10_on(release):
    for wheel in (release.linux, release.windows):
        _, _, _, tags = parse_wheel_filename(wheel.name)
        assert {(tag.interpreter, tag.abi) for tag in tags} == {("cp310", "abi3")}
        inside = metadata(wheel, "WHEEL")
        assert set(inside.get_all("Tag")) == {str(tag) for tag in tags}
        assert inside["Root-Is-Purelib"] == "false"
        assert metadata(wheel)["Requires-Python"] == ">=3.10"
    assert re.search(r"-manylinux_2_\d+_\w+\.whl$", release.linux.name)
    assert release.windows.name.endswith("-win_amd64.whl")


@pytest.mark.parametrize("name", [VERBS_MODULE, LINUX_CORE])
def test_linux_modules_need_the_c_library_and_the_stable_interface_of_python_alone(release, tmp_path, name):
    module = tmp_path / "module.so"
    module.write_bytes(contents(release.linux)[name])
    assert needed_by(module) == {"libc.so.6"}
    # Windows' python3.dll exports the stable interface and nothing else.
    stable = set(re.findall(r"\b_?Py\w+", output_of(OBJDUMP, "-p", WINDOWS_PYTHON / "python3.dll")))
    undefined = re.findall(r" U (\w+)", output_of("nm", "--dynamic", module))
    assert any(name.startswith("Py") for name in undefined)
    assert {name for name in undefined if name.startswith(("Py", "_Py"))} <= stable


def needed_by(library: Path) -> set[str]:
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", output_of("readelf", "--dynamic", library))
    return {name for name in needed if not name.startswith("ld-linux")}


def loaded_bytes(folder: Path, *libraries: bytes) -> int:
    """What is read of them into memory. In a file for aarch64 there are up to 64 KiB of nothing before the data."""
    library = folder / "library.so"
    total = 0
    for data in libraries:
        library.write_bytes(data)
        sizes = re.findall(r"^ +LOAD(?: +\w+){3} +(\w+)", output_of("readelf", "-lW", library), re.MULTILINE)
        assert sizes
        total += sum(int(size, 16) for size in sizes)
    return total


def test_softverbs_is_small_and_needs_the_c_library_alone(release, tmp_path):
    inside = contents(release.linux)
    assert loaded_bytes(tmp_path, *(inside[name] for name in (SOFTVERBS, *NAMED_BY_PROGRAMS))) <= MOST_OF_SOFTVERBS
    library = tmp_path / "library.so"
    for name in (SOFTVERBS, SHIM):
        library.write_bytes(inside[name])
        assert needed_by(library) == {"libc.so.6"}
    for name in NAMED_BY_PROGRAMS:
        library.write_bytes(inside[name])
        assert needed_by(library) <= {"libsoftverbs.so", "libc.so.6"}
        dynamic = output_of("readelf", "--dynamic", library)
        assert "[libsoftverbs.so]" in dynamic
        assert f"soname: [{Path(name).name}]" in dynamic
        assert "runpath: [$ORIGIN]" in dynamic


@pytest.mark.parametrize("compiler", OTHERS, ids=lambda compiler: Path(compiler).name)
def test_wheels_for_other_kinds_of_linux_have_code_for_these(release, tmp_path, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    ending, machine, c_library = OTHERS[compiler]
    (wheel,) = [path for path in release.others if re.search(ending, path.name)]
    inside = contents(wheel)
    assert inside.keys() == contents(release.linux).keys()
    _, _, _, tags = parse_wheel_filename(wheel.name)
    assert {(tag.interpreter, tag.abi) for tag in tags} == {("cp310", "abi3")}
    assert set(metadata(wheel, "WHEEL").get_all("Tag")) == {str(tag) for tag in tags}
    for name in (VERBS_MODULE, LINUX_CORE, SOFTVERBS, SHIM, *NAMED_BY_PROGRAMS):
        library = tmp_path / "library.so"
        library.write_bytes(inside[name])
        assert re.search(rf"Machine: +{machine}$", output_of("readelf", "--file-header", library), re.MULTILINE)
        assert needed_by(library) <= {"libsoftverbs.so", c_library}, name
    assert loaded_bytes(tmp_path, *(inside[name] for name in (SOFTVERBS, *NAMED_BY_PROGRAMS))) <= MOST_OF_SOFTVERBS


@pytest.mark.parametrize("name", [WINDOWS_MODULE, WINDOWS_CORE, SOFTND])
def test_windows_libraries_need_what_every_windows_has(release, tmp_path, name):
    library = tmp_path / "library.dll"
    library.write_bytes(contents(release.windows)[name])
    needed = re.findall(r"DLL Name: (\S+)", output_of(OBJDUMP, "-p", library))
    assert needed
    assert {name.lower() for name in needed} <= WINDOWS_LIBRARIES


def test_source_archive_has_the_whole_project(release):
    listed = run("git", "ls-files")
    if listed.returncode:
        pytest.skip("not a git checkout")
    with tarfile.open(release.sdist) as archive:
        packed = {name.partition("/")[2]: archive.getmember(name) for name in archive.getnames()}
    # Files whose name begins with a dot belong to the repository alone.
    tracked = {name for name in listed.stdout.splitlines() if not name.startswith(".") and (ROOT / name).exists()}
    assert tracked <= packed.keys()
    assert not [name for name in packed if name.endswith((".pyd", ".dll", ".so", ".so.1", ".o", ".pyc", ".whl"))]
    assert packed["rig/wine-python"].mode & 0o100


@only_under_stress
def test_source_archive_builds_and_runs_where_nothing_else_is(release):
    """pip fetches what the build needs. Then soft0 passes a part of the smoke test."""
    folder = PLACE / "from-source"
    venv.create(folder, with_pip=True)
    pip = (folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
    output_of(*pip, release.sdist, cwd=folder, PATH="/usr/bin:/bin")
    assert output_of(folder / "bin/ndpy", "--version", cwd=folder) == f"ndpy, version {version_of(release.linux)}\n"
    output = output_of(folder / "bin/ndpy", "smoke", "soft0", "--only", "send-receive", cwd=folder)
    assert " 0 failed, " in output.splitlines()[-1], output


def test_linux_wheel_runs_without_the_checkout(release, on_linux):
    version = output_of(on_linux / "bin/ndpy", "--version", cwd=on_linux)
    assert version == f"ndpy, version {version_of(release.linux)}\n"
    code = "import ndpy, ndpy._verbs; print(ndpy.__version__, ndpy.__file__, ndpy._verbs.__file__, sep='\\n')"
    told = output_of(on_linux / "bin/python", "-W", "error", "-c", code, cwd=on_linux).splitlines()
    assert told[0] == version_of(release.linux)
    assert all(Path(path).is_relative_to(on_linux) for path in told[1:])
    assert told[2].endswith(VERBS_MODULE)


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has an adapter")
def test_linux_wheel_says_that_there_is_no_adapter(on_linux):
    done = run(on_linux / "bin/ndpy", "devices", cwd=on_linux)
    assert done.returncode == 1
    assert "no RDMA adapter" in done.stdout + done.stderr


def test_first_program_of_the_readme_runs_on_the_adapter_of_the_linux_wheel(on_linux, tmp_path):
    program, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "hello.py").write_text(program)
    for command in ([], [on_linux / "bin/ndpy", "soft", "run", "--"]):
        words = [*command, on_linux / "bin/python", tmp_path / "hello.py"]
        output = output_of(*words, cwd=tmp_path, **({} if command else {"NDPY_ADAPTER": "soft0"}))
        assert output.splitlines()[-1] == "hello over RDMA on soft0"


def test_smoke_test_of_the_linux_wheel_passes_on_it(on_linux):
    output = output_of(on_linux / "bin/ndpy", "smoke", "soft0", cwd=on_linux)
    verdict = re.fullmatch(
        r"smoke: (\d+) passed, 0 failed, 0 known, \d+ skipped on soft0 \(verbs, software\)", output.splitlines()[-1]
    )
    assert verdict and int(verdict[1]) > 80, output


def test_wheel_for_free_threaded_python_leaves_the_gil_disabled_and_passes_the_smoke_test(release, tmp_path):
    if release.freethreaded is None:
        pytest.skip("needs the Python of rig/freethreaded.sh")
    _, _, _, tags = parse_wheel_filename(release.freethreaded.name)
    assert {tag.abi for tag in tags} == {tag.interpreter + "t" for tag in tags}
    pip = (FREE_THREADED, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index", "--no-deps")
    output_of(*pip, "--target", tmp_path, release.freethreaded)
    code = "import sys, ndpy; ndpy.open_adapter('soft0').close(); print(sys._is_gil_enabled(), ndpy.__file__)"
    # A module that does not say that it works without the GIL enables it, with a warning.
    told = output_of(FREE_THREADED, "-W", "error", "-c", code, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert told.split() == ["False", str(tmp_path / "ndpy/__init__.py")]
    output = output_of(FREE_THREADED, "-m", "ndpy", "smoke", "soft0", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert re.match(r"smoke: \d+ passed, 0 failed, 0 known, \d+ skipped on soft0", output.splitlines()[-1]), output


def test_windows_wheel_runs_without_the_checkout(release, on_windows):
    assert windows(on_windows, "-m", "ndpy", "--version").split()[-1] == version_of(release.windows)
    code = "import ndpy, ndpy._networkdirect as m, sys; print(ndpy.__version__, m.__file__, *sys.path, sep='\\n')"
    version, module, *paths = windows(on_windows, "-c", code).splitlines()
    assert version == version_of(release.windows)
    folder = "Z:" + str(PLACE / "windows").replace("/", "\\")
    assert module.replace("\\", "/").endswith(WINDOWS_MODULE)
    assert all(path.startswith(folder) for path in [module, *paths])


def test_softnd_of_the_windows_wheel_is_an_adapter(on_windows):
    output = windows(on_windows, "-m", "ndpy", "devices", NDPY_PROVIDER=installed_softnd(on_windows))
    assert re.search(r"^softnd0 +networkdirect .* active ", output, re.MULTILINE), output


def test_first_program_of_the_readme_runs_on_it(on_windows, tmp_path):
    program, *_ = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "hello.py").write_text(program)
    output = windows(on_windows, tmp_path / "hello.py", NDPY_PROVIDER=installed_softnd(on_windows))
    assert output.splitlines()[-1] == "hello over RDMA on softnd0"


def test_smoke_test_of_the_windows_wheel_passes_on_it(on_windows):
    """Its peer is a second process. Without NDPY_STRESS=1 only some checks run."""
    some = [] if STRESS else ["--only", "send-receive", "--only", "windows"]
    softnd = installed_softnd(on_windows)
    output = windows(on_windows, "-m", "ndpy", "smoke", "softnd0", *some, NDPY_PROVIDER=softnd)
    verdict = re.fullmatch(r"smoke: (\d+) passed, 0 failed, .* on softnd0 .*", output.splitlines()[-1])
    assert verdict and int(verdict[1]) > 10, output
