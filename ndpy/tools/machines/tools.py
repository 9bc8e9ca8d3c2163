"""The programs that software adapters and the VM need, how to install them, and kernels."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ndpy.platforms.verbs import distribution
from ndpy.tools.machines import SetupError

# What ndpy.platforms.verbs.distribution calls each program. vng is from PyPI everywhere.
THINGS = {
    "qemu-system-x86_64": distribution.QEMU,
    "busybox": distribution.BUSYBOX,
    "file": distribution.FILE,
    "modprobe": distribution.KMOD,
    "depmod": distribution.KMOD,
    "zstd": distribution.ZSTD,
    "ip": distribution.IPROUTE,
    "rdma": distribution.IPROUTE,
    "vng": "",
}
FOR_VM = ("vng", "qemu-system-x86_64", "busybox", "file", "depmod", "modprobe", "ip", "rdma", "zstd")

# For each kind of adapter: its module, and where that can be below a kernel's folder.
_MODULES = {
    "rxe": (
        "rdma_rxe",
        ("kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko*",),
    ),
    "siw": (
        "siw",
        ("kernel/drivers/infiniband/sw/siw/siw.ko*", "updates/siw.ko*", "updates/*/siw.ko*"),
    ),
}


def search_path() -> str:
    """PATH, with the folder of this Python before it and the folders of system programs after it."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


def find(tool: str) -> str | None:
    """The path of a program, or None if there is none."""
    return shutil.which(tool, path=search_path())


def missing(tools: Iterable[str]) -> list[str]:
    """The tools that are missing."""
    return [tool for tool in tools if find(tool) is None]


def explain_missing(absent: Sequence[str], root: Path = Path("/")) -> str:
    """One message for all the missing tools, with the commands that install them."""
    here = distribution.read(root)
    lines = ["these programs are missing:"]
    for tool in absent:
        packages = " ".join(here.packages(THINGS[tool])) if THINGS[tool] else "virtme-ng, from PyPI"
        lines.append(f"  {tool:20} package {packages}" if packages else f"  {tool}")
    things = sorted({THINGS[tool] for tool in absent} - {""})
    if things:
        lines.append(f"install them, {here.install(*things)}")
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


def find_kernel(
    version: str | None = None, root: Path = Path("/"), adapters: Sequence[str] = ("rxe",), system: Path = Path("/")
) -> Kernel:
    """Find the kernel `version`, or else the newest one that has the module and an image that this user may read.

    root: the folder with the lib/modules and boot that are searched.
    adapters: rxe, siw or both. With both, only rxe is required.
    system: the root folder of this machine.
    Raises SetupError, which lists the kernels that were examined and what each lacks.
    """
    module, places = _MODULES["rxe" if "rxe" in adapters else "siw"]
    lacking: list[str] = []
    modules = root / "lib/modules"
    found = sorted(modules.iterdir(), key=lambda path: _version_key(path.name)) if modules.is_dir() else []
    for folder in reversed(found):
        if version is not None and folder.name != version:
            continue
        if not any(True for place in places for _ in folder.glob(place)):
            lacking.append(f"  {folder.name}: no module {module}")
            continue
        images = [folder / "vmlinuz", root / "boot" / f"vmlinuz-{folder.name}"]
        for image in images:
            if os.access(image, os.R_OK):
                return Kernel(folder.name, image)
        # Ubuntu's images may be read by root only.
        closed = [image for image in images if image.exists()]
        if closed:
            lacking.append(f"  {folder.name}: no permission to read its image (as root: chmod a+r {closed[0]})")
        else:
            lacking.append(f"  {folder.name}: no readable image vmlinuz in {folder} or {root / 'boot'}")
    wanted = f"kernel {version} with {module} was not" if version else f"no kernel with {module} was"
    raise SetupError(
        "\n".join(
            [
                f"{wanted} found in {modules}{':' if lacking else ''}",
                *lacking,
                distribution.read(system).install_kernel(module),
            ]
        )
    )
