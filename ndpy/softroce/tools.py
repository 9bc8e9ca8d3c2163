"""The programs that software adapters and the VM need, the Debian and Ubuntu packages that have them, and kernels."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndpy.softroce import SetupError

PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "file": "file",
    "modprobe": "kmod",
    "depmod": "kmod",
    "zstd": "zstd",
    "ip": "iproute2",
    "rdma": "iproute2",
    "vng": "virtme-ng (from PyPI, or the extra ndpy[softroce])",
}
FOR_LINKS = ("ip", "rdma", "modprobe")
FOR_VM = ("vng", "qemu-system-x86_64", "busybox", "file", "depmod", "modprobe", "ip", "rdma", "zstd")

# For each kind of adapter: its module, where that can be below a kernel's folder, and how to get it.
_MODULES = {
    "rxe": (
        "rdma_rxe",
        ("kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*",),
        "run `make setup` in a checkout of ndpy, or install the package linux-image-amd64 (Debian; not its "
        "cloud flavour) or linux-image-generic with linux-modules-extra-VERSION (Ubuntu)",
    ),
    "siw": (
        "siw",
        ("kernel/drivers/infiniband/sw/siw/siw.ko*", "updates/siw.ko*", "updates/*/siw.ko*"),
        "`make setup` in a checkout of ndpy builds it on Debian, whose kernels lack it. Ubuntu has it in "
        "linux-modules-extra-VERSION",
    ),
}


def search_path() -> str:
    """PATH, with the folder of this Python before it and the folders of system programs after it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find(tool: str) -> str | None:
    """The path of a program, or None if there is none."""
    return shutil.which(tool, path=search_path())


def missing(tools: Iterable[str]) -> dict[str, str]:
    """The tools that are missing, each with the package that has it."""
    return {tool: PACKAGES[tool] for tool in tools if find(tool) is None}


def explain_missing(absent: Mapping[str, str]) -> str:
    """One message for all the missing tools, with the commands that install them."""
    lines = ["these programs are missing:"]
    lines += [f"  {tool:20} package {package}" for tool, package in absent.items()]
    from_apt = sorted({package for package in absent.values() if " " not in package})
    if from_apt:
        lines.append(f"install them: apt-get install {' '.join(from_apt)}")
    if "vng" in absent:
        lines.append(f"install virtme-ng: {sys.executable} -m pip install virtme-ng")
    return "\n".join(lines)


@dataclass(frozen=True)
class Kernel:
    """A kernel that the VM can boot: its version and the path of its image."""

    version: str
    image: Path


def _version_key(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def find_kernel(version: str | None = None, root: Path = Path("/"), adapters: Sequence[str] = ("rxe",)) -> Kernel:
    """Find the kernel `version`, or else the newest one that has the module and an image that this user may read.

    adapters: rxe, siw or both. With both, only rxe is required.
    Raises SetupError, which lists the kernels that were examined and what each lacks.
    """
    module, places, remedy = _MODULES["rxe" if "rxe" in adapters else "siw"]
    lacking: list[str] = []
    modules = root / "lib/modules"
    found = sorted(modules.iterdir(), key=lambda path: _version_key(path.name)) if modules.is_dir() else []
    for folder in reversed(found):
        if version is not None and folder.name != version:
            continue
        if not any(True for place in places for _ in folder.glob(place)):
            lacking.append(f"  {folder.name}: no module {module}")
            continue
        for image in (folder / "vmlinuz", root / "boot" / f"vmlinuz-{folder.name}"):
            if os.access(image, os.R_OK):
                return Kernel(folder.name, image)
        lacking.append(f"  {folder.name}: no readable image vmlinuz in {folder} or {root / 'boot'}")
    wanted = f"kernel {version} with {module} was not" if version else f"no kernel with {module} was"
    raise SetupError(
        "\n".join(
            [
                f"{wanted} found in {modules}{':' if lacking else ''}",
                *lacking,
                remedy,
            ]
        )
    )
