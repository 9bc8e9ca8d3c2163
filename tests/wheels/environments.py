"""Environments in which an installed ndpy runs, and nothing of the checkout is on a path."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from kit.deadlines import patient
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
WINDOWS_PYTHON = ROOT / ".rig/wine/python"
# rig/freethreaded.sh provides it.
FREE_THREADED = ROOT / ".rig/freethreaded/venv/bin/python"
# Not a temporary folder, because tests/verbs/test_installed.py runs the Linux environment in a virtual machine.
PLACE = ROOT / ".rig/wheels"
#: Whether rig/setup.sh has provided what these tests need.
PROVIDED = sys.platform == "linux" and (WINDOWS_PYTHON / "python.exe").exists()
SOFTND = "ndpy/networkdirect/softnd.dll"
# The cross-compilers for other kinds of Linux: the end of the wheel's name, the machine, and the C library.
OTHERS = {
    "musl-gcc": (r"-musllinux_1_2_x86_64\.whl$", "Advanced Micro Devices X86-64", "libc.so"),
    "aarch64-linux-gnu-gcc": (r"-manylinux_2_\d+_aarch64\.whl$", "AArch64", "libc.so.6"),
    # rig/zig.sh provides it.
    str(ROOT / ".rig/zig/aarch64-linux-musl-gcc"): (r"-musllinux_1_2_aarch64\.whl$", "AArch64", "libc.so"),
}


def run(*command: str | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    # The installed package must see neither the adapter of the test run nor the checkout.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NDPY_", "PYTHON"))}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env={**clean, **variables}, capture_output=True, text=True, timeout=patient(400)
    )


def output_of(*command: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    done = run(*command, cwd=cwd, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Release:
    """The files of a release. freethreaded: the wheel for a free-threaded Python, if one is there. others: wheels for
    kinds of Linux other than this one, if their compilers are there.
    """

    sdist: Path
    linux: Path
    freethreaded: Path | None
    windows: Path
    others: tuple[Path, ...]


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def metadata(wheel: Path, name: str = "METADATA") -> email.message.Message:
    (text,) = [data for path, data in contents(wheel).items() if path.endswith(f".dist-info/{name}")]
    return email.message_from_bytes(text)


def version_of(wheel: Path) -> str:
    return metadata(wheel)["Version"]


def install(wheel: Path, folder: Path, *options: str) -> None:
    """Install a wheel into a folder with pip, which refuses a wheel whose tags do not fit."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-index", "--no-deps")
    output_of(*pip, "--target", folder, *options, wheel)


def copy_distributions(wanted: Iterable[str], folder: Path, sources: list[Path], environment: dict[str, str]) -> None:
    """Copy these distributions, and what they require in that environment, from the first of the sources that has
    each.
    """
    present: dict[str, tuple[Path, Distribution]] = {}
    for source in reversed(sources):
        present |= {
            canonicalize_name(found.metadata["Name"]): (source, found) for found in distributions(path=[str(source)])
        }
    done: set[str] = set()

    def copy(requirements: Iterable[str]) -> None:
        for requirement in map(Requirement, requirements):
            if requirement.marker and not requirement.marker.evaluate({"extra": "", **environment}):
                continue
            name = canonicalize_name(requirement.name)
            source, found = present[name]
            assert requirement.specifier.contains(found.version), requirement
            if name in done:
                continue
            done.add(name)
            for file in found.files or []:
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source / file, folder / file)
            copy(found.requires or [])

    copy(wanted)


def required_by(wheel: Path) -> list[str]:
    required: list[str] = metadata(wheel).get_all("Requires-Dist")
    assert any(line.startswith("cffi") for line in required)
    return required


def linux_environment(folder: Path, wheel: Path, *others: str) -> Path:
    """Make a virtual environment with a wheel for Linux, what it requires, and other distributions."""
    venv.create(folder, symlinks=True)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin/python")
    output_of(*pip, "install", "--no-index", "--no-deps", wheel)
    (site,) = folder.glob("lib/python3*/site-packages")
    (source,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    copy_distributions([*required_by(wheel), *others], site, [source], {})
    return folder


def windows_environment(folder: Path, wheel: Path, *others: str) -> Path:
    """Make a Windows Python with the Windows wheel, what it requires, and other distributions, which may be of this
    machine's Python if they have no compiled code. Returns its python.exe.
    """
    shutil.copytree(WINDOWS_PYTHON, folder / "python", ignore=shutil.ignore_patterns("Lib"))
    (paths,) = (folder / "python").glob("*._pth")
    zipped = paths.read_text().split()[0]
    paths.write_text(f"{zipped}\n.\n..\\packages\nimport site\n")
    digits = re.sub(r"\D", "", zipped)
    version = f"{digits[0]}.{digits[1:]}"
    packages = folder / "packages"
    tags = ("--platform", "win_amd64", "--python-version", version, "--implementation", "cp")
    install(wheel, packages, "--only-binary", ":all:", *tags)
    environment = {"sys_platform": "win32", "os_name": "nt", "platform_system": "Windows", "python_version": version}
    (own,) = Path(sys.prefix).glob("lib/python3*/site-packages")
    copy_distributions([*required_by(wheel), *others], packages, [WINDOWS_PYTHON / "Lib", own], environment)
    return folder / "python/python.exe"


def windows(python: Path, *arguments: str | Path, **variables: str) -> str:
    """Run a Windows Python in an empty folder. It must succeed. Returns its output."""
    empty = PLACE / "empty"
    empty.mkdir(exist_ok=True)
    return output_of(ROOT / "rig/wine-python", "--run", python, *arguments, cwd=empty, **variables)


def installed_softnd(python: Path) -> str:
    """The Windows path of the softnd.dll in that Python's ndpy."""
    path = python.parents[1] / "packages" / SOFTND
    return "Z:" + str(path).replace("/", "\\")
