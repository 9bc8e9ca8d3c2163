"""The device files of RDMA: what keeps this process from one, and what to do.

The kernel shows every adapter in /sys. A process may use those whose files it can open in /dev/infiniband. So a
container or a pod sees all adapters of its host, of which some are its own.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from ndpy.platforms.verbs import distribution, softverbs
from ndpy.vocabulary import system_files
from ndpy.vocabulary.system_files import names, path, read, shown

_FOLDER = "/dev/infiniband"
#: The errors with which somebody else's file is kept from this process.
_KEPT = (errno.ENOENT, errno.EPERM, errno.EACCES)
_KUBERNETES = "KUBERNETES_SERVICE_HOST"
KUBERNETES_SECRETS = "/var/run/secrets/kubernetes.io"


class DeviceFile(NamedTuple):
    """A device file, the adapter that it is of, and why this process cannot open it. adapter: "" if the kernel does not
    say.
    """

    place: Path
    adapter: str
    error: OSError | None

    @property
    def is_withheld(self) -> bool:
        """Whether whoever started this container or service gave it away, or to nobody: it is not in /dev, or not
        allowed.
        """
        return self.error is not None and self.error.errno in (errno.ENOENT, errno.EPERM)

    def is_of(self, which: str) -> bool:
        """Whether it is of the adapter "NAME" or "NAME:PORT"."""
        return bool(self.adapter) and self.adapter in (which, which.rpartition(":")[0])


def all_files() -> list[DeviceFile]:
    """The file of each adapter of the kernel. If /sys names no adapter, the files that exist."""
    of_kernel = path("/sys/class/infiniband_verbs")
    entries = names(of_kernel, "uverbs*") or names(path(_FOLDER), "uverbs*")
    return [look_at(entry, read(of_kernel / entry / "ibdev")) for entry in entries]


def of_others(files: list[DeviceFile], adapter: str = "") -> list[DeviceFile]:
    """The files that this process cannot open and need not: it can open another one, and `adapter` does not name
    theirs.
    """
    if not any(file.error is None for file in files):
        return []
    return [file for file in files if file.error is not None and not file.is_of(adapter) and file.error.errno in _KEPT]


def look_at(name: str, adapter: str = "") -> DeviceFile:
    """Try to open a file of /dev/infiniband."""
    place = path(_FOLDER, name)
    return DeviceFile(place, adapter, system_files.refusal(place))


def why_refused(file: DeviceFile) -> tuple[str, str]:
    """Why this process cannot open the file, and what to do."""
    error = file.error
    assert error is not None
    reason = f"it cannot be opened by uid {os.geteuid()}: {error.strerror}"
    if error.errno == errno.ENOENT:
        if in_container():
            return "this container was not given it", give([file])
        module = "rdma_ucm" if file.place.name == "rdma_cm" else "ib_uverbs"
        return reason, _make([module])
    if error.errno == errno.EPERM:
        # The mode allows it. A control group's list of devices does not.
        return f"{reason} (the control group's list of devices forbids it)", give([file])
    if error.errno == errno.EACCES:
        rules = distribution.read().install(distribution.RULES)
        mode = f" ({stat.filemode(file.place.stat().st_mode)})" if file.place.exists() else ""
        return (
            f"{reason}{mode}",
            (
                "add the user to the group that owns the file, or take rdma-core, whose udev rules open it to all "
                f"({rules})"
            ),
        )
    return reason, "read the driver's messages in the kernel's log (dmesg); load the driver again"


def why_none(files: Iterable[DeviceFile]) -> tuple[str, str]:
    """Why there is no device file of an adapter, and what to do."""
    adapters = names(path("/sys/class/infiniband"))
    kernel = f"the kernel has {', '.join(adapters)}"
    if not adapters:
        return (
            "the kernel has no RDMA device",
            (
                "for a card, load its driver (lspci shows the card, and `modprobe mlx5_ib` loads the driver of "
                "NVIDIA's cards); without one, `ndpy softroce up` makes one in software, and `ndpy vm run -- COMMAND` "
                "runs a command in a small machine that has one"
            ),
        )
    if in_container():
        return f"{kernel}, but this container was given no device file of an adapter", give(files)
    if is_loaded("ib_uverbs"):
        return f"{kernel}, but this /dev has no device file of an adapter", _make(["ib_uverbs", "rdma_ucm"])
    return f"{kernel}, but no module that makes the device files", _make(["ib_uverbs", "rdma_ucm"])


def why_no_adapter() -> str:
    """Say what is missing on a machine without verbs devices, and what to do: "REASON: REMEDY"."""
    hint = softverbs.hint()
    reason, remedy = _missing()
    return f"{reason}: {remedy}" + (f"; or, without an adapter, {hint}" if hint else "")


def why_unlisted(adapter: str) -> str:
    """Why libibverbs does not list this adapter, and what to do. "" if the kernel has none of this name."""
    for file in all_files():
        if file.adapter == adapter:
            if file.error is None:
                reason, remedy = "libibverbs has no driver that fits", "`ndpy doctor` says why"
            else:
                reason, remedy = why_refused(file)
            return f"the kernel has it as {shown(file.place)}, but {reason}; {remedy}"
    return ""


def _missing() -> tuple[str, str]:
    files = all_files()
    there = [file for file in files if file.error is None or file.error.errno != errno.ENOENT]
    if not there or not names(path("/sys/class/infiniband")):
        return why_none(files)
    adapters = ", ".join(file.adapter for file in there if file.adapter) or ", ".join(
        names(path("/sys/class/infiniband"))
    )
    return (
        f"the kernel has {adapters}, but libibverbs has no driver that fits",
        (
            f"{distribution.read().install(distribution.LIBIBVERBS)}, or another version of it, if libibverbs prints "
            "to standard error that its driver does not support the kernel's ABI (`ndpy doctor` says which)"
        ),
    )


def is_loaded(module: str) -> bool:
    """Whether the kernel has the module. One that is built in may have no folder in /sys/module."""
    made = {"ib_uverbs": "/sys/class/infiniband_verbs", "rdma_ucm": "/sys/class/misc/rdma_cm"}.get(module)
    return path("/sys/module", module).exists() or (made is not None and path(made).exists())


def _make(modules: list[str]) -> str:
    """What to do outside a container where device files are absent."""
    if all(map(is_loaded, modules)):
        return (
            "the modules are loaded, so let udev make the files (udevadm trigger), and in a service of systemd or a "
            "chroot let /dev have them (PrivateDevices=no, BindPaths=)"
        )
    return f"as root: modprobe {'-a ' if len(modules) > 1 else ''}{' '.join(modules)}"


def give(files: Iterable[DeviceFile]) -> str:
    """How this container or service is given device files. rdma_cm, which all adapters need, goes with them."""
    wanted = list(files)
    places = [shown(file.place) for file in wanted]
    if len(places) > 1 or not places:
        places = [f"{_FOLDER}/uverbsN"]
    places = list(dict.fromkeys([*places, f"{_FOLDER}/rdma_cm"]))
    of = ", ".join(f"{file.place.name} is {file.adapter}" for file in wanted if file.adapter) if len(wanted) > 1 else ""
    if in_pod():
        return (
            "ask for an adapter in the pod's resources (resources: limits: with the name that the device plugin gives "
            "it, such as rdma/hca_shared_devices_a: 1)"
        )
    if in_container():
        return f"docker run {' '.join(f'--device={place}' for place in places)}{f' ({of})' if of else ''}"
    return (
        "allow it to the service: DeviceAllow=char-infiniband_verbs rw and DeviceAllow=char-infiniband_cm rw of its "
        "systemd unit"
    )


def in_pod() -> bool:
    """Whether this is a container of Kubernetes."""
    sign = in_container()
    return sign in (_KUBERNETES, KUBERNETES_SECRETS) or "kubepods" in sign


def in_container() -> str:
    """Return what shows that this is a container. "" if nothing does."""
    for line in (*read(path("/proc/1/environ")).split("\0"), *read(path("/proc/self/environ")).split("\0")):
        name = line.partition("=")[0]
        if name == _KUBERNETES:
            return name
    for marker in (KUBERNETES_SECRETS, "/.dockerenv", "/run/.containerenv"):
        if path(marker).exists():
            return marker
    for word in read(path("/proc/1/environ")).split("\0"):
        if word.startswith("container="):
            return word
    groups = re.search(r"/(docker|kubepods|lxc|libpod)\b", read(path("/proc/self/cgroup")))
    return f"the control group {groups[1]}" if groups else ""
