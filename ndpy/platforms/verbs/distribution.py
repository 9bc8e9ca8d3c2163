"""The Linux distribution of this machine, and how to install there what ndpy's remedies ask for.

The release file os-release(5) names the distribution. ndpy knows the package names of four families: Debian, Ubuntu,
Fedora and RHEL. Elsewhere a remedy names the file or program and the project that it is from, and no package.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from ndpy.vocabulary import system_files

# What remedies ask for.
LIBIBVERBS = "libibverbs"
LIBRDMACM = "librdmacm"
RULES = "rules"
HEADERS = "headers"
VERBS_PROGRAMS = "verbs programs"
CONNECTION_PROGRAMS = "connection programs"
PERFTEST = "perftest"
QEMU = "qemu"
BUSYBOX = "busybox"
FILE = "file"
KMOD = "kmod"
ZSTD = "zstd"
IPROUTE = "iproute"

# What each is in the words of the project that it is from, its packages in Debian and Ubuntu, and its packages in
# Fedora.
_THINGS = {
    LIBIBVERBS: ("libibverbs.so.1 and its drivers from rdma-core", "libibverbs1 ibverbs-providers", "libibverbs"),
    LIBRDMACM: ("librdmacm.so.1 from rdma-core", "librdmacm1", "librdmacm"),
    RULES: ("the udev rules from rdma-core", "rdma-core", "rdma-core"),
    HEADERS: (
        "the headers of libibverbs and librdmacm from rdma-core",
        "libibverbs-dev librdmacm-dev",
        "rdma-core-devel",
    ),
    VERBS_PROGRAMS: ("ibv_devinfo and the ibv_*_pingpong programs from rdma-core", "ibverbs-utils", "libibverbs-utils"),
    CONNECTION_PROGRAMS: (
        "rping and the other programs of librdmacm from rdma-core",
        "rdmacm-utils",
        "librdmacm-utils",
    ),
    PERFTEST: ("ib_send_bw and the other programs from perftest", "perftest", "perftest"),
    QEMU: ("qemu-system-x86_64 from QEMU", "qemu-system-x86", "qemu-system-x86-core"),
    BUSYBOX: ("a static busybox from BusyBox", "busybox-static", "busybox"),
    FILE: ("file from the project of that name", "file", "file"),
    KMOD: ("modprobe and depmod from kmod", "kmod", "kmod"),
    ZSTD: ("zstd from Zstandard", "zstd", "zstd"),
    IPROUTE: ("ip and rdma from iproute2", "iproute2", "iproute"),
}
# RHEL's QEMU is /usr/libexec/qemu-kvm, of the package qemu-kvm. No package has qemu-system-x86_64.
_NOT_IN_RHEL = (QEMU, BUSYBOX)

_COMMANDS = {"debian": "apt-get install", "ubuntu": "apt-get install", "fedora": "dnf install", "rhel": "dnf install"}
_COMMANDS_AGAIN = {"apt-get install": "apt-get install --reinstall", "dnf install": "dnf reinstall"}
# Rebuilds of RHEL have its packages under the same names.
_FAMILIES = {"centos": "rhel", "rocky": "rhel", "almalinux": "rhel", **{family: family for family in _COMMANDS}}

# Kernel modules that a family's kernels are built without.
_BUILT_WITHOUT: dict[str, tuple[str, ...]] = {"debian": ("siw",), "rhel": ("rdma_rxe",)}

_OPTIONS = {
    "ib_uverbs": "CONFIG_INFINIBAND_USER_ACCESS",
    "rdma_ucm": "CONFIG_INFINIBAND_USER_ACCESS",
    "rdma_rxe": "CONFIG_RDMA_RXE",
    "siw": "CONFIG_RDMA_SIW",
}

_FILES = ("etc/os-release", "usr/lib/os-release")
# A release file has a few hundred bytes.
_MOST_OCTETS = 1 << 16
_LONGEST_SHOWN = 40


@dataclass(frozen=True)
class Distribution:
    """What the release file says.

    id: its ID, made printable and cut; "" if there is none.
    family: "debian", "ubuntu", "fedora" or "rhel"; "" if ndpy does not know the distribution.
    file: the release file; "" if there is none.
    """

    id: str
    family: str
    file: str

    def packages(self, thing: str) -> tuple[str, ...]:
        """The packages that have the thing. Empty if ndpy knows none."""
        if not self.family or (self.family == "rhel" and thing in _NOT_IN_RHEL):
            return ()
        _, debian, fedora = _THINGS[thing]
        return tuple((debian if self.family in ("debian", "ubuntu") else fedora).split())

    def install(self, *things: str, again: bool = False) -> str:
        """Say how to install the things. The text has no "; ", which separates an error from its remedy.

        again: they are installed, but damaged.
        """
        known = [package for thing in things for package in self.packages(thing)]
        unknown = [_THINGS[thing][0] for thing in things if not self.packages(thing)]
        parts = []
        if known:
            command = _COMMANDS_AGAIN[_COMMANDS[self.family]] if again else _COMMANDS[self.family]
            parts.append(f"as root: {command} {' '.join(dict.fromkeys(known))}{self._likeness()}")
        if unknown:
            why = f"ndpy knows no package of {self.id} for it" if self.family else self.unknown()
            parts.append(f"install {', '.join(dict.fromkeys(unknown))}{' again' if again else ''} ({why})")
        return ", and ".join(parts)

    def unknown(self) -> str:
        """Say that ndpy does not know this distribution, and what its release file says."""
        said = f"{self.file} says ID={self.id}" if self.id else f"{self.file} has no ID"
        if not self.file:
            said = "there is no /etc/os-release"
        return f"ndpy does not know this distribution's package names: {said}"

    def install_module(self, module: str, release: str) -> str:
        """Say how to get a module for the running kernel `release`. The text has no "; "."""
        lacking = module in _BUILT_WITHOUT.get(self.family, ())
        if self.family == "debian":
            if lacking:
                return f"Debian's kernels have no {module}, but `make setup` in a checkout of ndpy builds it"
            return (
                "as root: apt-get install linux-image-amd64, and boot it (the cloud flavour has no "
                f"{module}){self._likeness()}"
            )
        if self.family == "ubuntu":
            return f"as root: apt-get install linux-modules-extra-{release}{self._likeness()}"
        if lacking:
            return f"the kernels of {self.id} are built without {module}{self._likeness()}"
        if self.family:
            return f"as root: dnf install kernel-modules-{release}{self._likeness()}"
        return f"install the module {module} ({_option(module)}) for kernel {release} ({self.unknown()})"

    def install_kernel(self, module: str) -> str:
        """Say how to get a kernel with the module, for the VM to boot."""
        setup = "run `make setup` in a checkout of ndpy"
        lacking = module in _BUILT_WITHOUT.get(self.family, ())
        if self.family == "debian" and lacking:
            return f"{setup}, which builds {module}, since Debian's kernels have none{self._likeness()}"
        if self.family == "debian":
            return (
                f"{setup}, or, as root: apt-get install linux-image-amd64 (its cloud flavour has no "
                f"{module}){self._likeness()}"
            )
        if self.family == "ubuntu":
            packages = "linux-image-generic, which brings linux-modules-extra-VERSION with it"
            return f"{setup}, or, as root: apt-get install {packages}{self._likeness()}"
        if self.family == "fedora":
            return f"{setup}, or, as root: dnf install kernel-core kernel-modules{self._likeness()}"
        unpack = "unpack a kernel that has it and name its folder with --kernel-root"
        if self.family == "rhel":
            built = "are" if lacking else "may have been"
            return f"the kernels of {self.id} {built} built without {module}{self._likeness()}: {unpack}"
        return f"{unpack}: it needs {_option(module)} ({self.unknown()})"

    def _likeness(self) -> str:
        if self.id in _FAMILIES:
            return ""
        return f" (the names are those of {self.family}, which ID_LIKE of {self.id or 'this distribution'} names)"


def _option(module: str) -> str:
    return f"{_OPTIONS[module]} of Linux" if module in _OPTIONS else "of Linux"


def module_packages(release: str) -> str:
    """The packages of additional kernel modules of all families, for a container, which does not show the host's
    family.
    """
    return (
        f"linux-modules-extra-{release} (Ubuntu), linux-image-amd64 (Debian; its cloud flavour has none), or "
        f"kernel-modules-{release} (Fedora, RHEL)"
    )


def read(root: Path | None = None) -> Distribution:
    """Read the release file of this machine, or of the one whose files are below `root`. Nothing in it is executed."""
    for name in _FILES:
        path = system_files.path(f"/{name}") if root is None else root / name
        try:
            # A pipe or a device here would block.
            if not path.is_file():
                continue
            with path.open("rb") as file:
                text = file.read(_MOST_OCTETS).decode(errors="replace")
        except OSError:
            continue
        values = _values(text)
        words = [values.get("ID", ""), *values.get("ID_LIKE", "").split()]
        family = next((_FAMILIES[word] for word in words if word in _FAMILIES), "")
        shown = re.sub(r"[^A-Za-z0-9._-]", "?", values.get("ID", ""))[:_LONGEST_SHOWN]
        return Distribution(shown, family, f"/{name}")
    return Distribution("", "", "")


def _values(text: str) -> dict[str, str]:
    """The assignments of a release file. The last one of a name counts, as in a shell."""
    found = {}
    for line in text.split("\n"):
        name, equals, value = line.strip().partition("=")
        if equals and name in ("ID", "ID_LIKE"):
            try:
                found[name] = " ".join(shlex.split(value))
            except ValueError:  # a quotation mark without its other half
                found[name] = value
    return found
