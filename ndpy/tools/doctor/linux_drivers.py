"""The devices that libibverbs lists, and those that it has no fitting driver for.

A driver of libibverbs knows some versions of the interface of its kernel driver (the ABI). If the kernel's is another
one, libibverbs leaves the device out of its list, and says so only on standard error.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from ndpy.platforms.verbs import device_files, distribution
from ndpy.platforms.verbs.adapter_info import device_names
from ndpy.platforms.verbs.device_files import DeviceFile
from ndpy.tools.doctor.findings import Finding, failed, warned
from ndpy.vocabulary.descriptors import owned

_MISFIT = re.compile(
    r"Driver (?P<driver>\S+) does not support the kernel ABI of (?P<kernel>\d+) "
    r"\(supports (?P<least>\d+) to (?P<most>\d+)\) for device \S*?(?P<device>[^/\s]+)\s*$"
)
_OTHER_LIBRARY = re.compile(r"kernel ABI version (?P<kernel>\d+) doesn't match library version (?P<most>\d+)")


class Listed(NamedTuple):
    """What libibverbs lists, and why not more.

    Parameters:
        devices: the devices' names.
        misfits: why libibverbs left a device out, by its name.
        general: why libibverbs does not list any, or "".
    """

    devices: list[str]
    misfits: dict[str, tuple[str, str]]
    general: tuple[str, str] | None


def list_devices() -> Listed:
    """List the devices. Only for a process of its own: what other threads print meanwhile comes late."""
    with _caught() as printed:
        devices = device_names()
    misfits: dict[str, tuple[str, str]] = {}
    general = None
    for line in printed:
        if match := _MISFIT.search(line):
            # Another driver may take the device.
            if match["device"] not in devices:
                misfits[match["device"]] = _misfit(match)
        elif match := _OTHER_LIBRARY.search(line):
            what = (
                f"libibverbs knows version {match['most']} of the kernel's verbs interface, which has version "
                f"{match['kernel']}"
            )
            general = what, _newer(int(match["kernel"]) > int(match["most"]))
        else:
            print(line, file=sys.stderr)
    return Listed(devices, misfits, general)


def _misfit(match: re.Match[str]) -> tuple[str, str]:
    least, most, kernel = match["least"], match["most"], match["kernel"]
    known = f"version {least}" if least == most else f"versions {least} to {most}"
    return (
        (
            f"libibverbs' driver {match['driver']} knows {known} of the interface of the kernel's driver (its ABI), "
            f"which has version {kernel}"
        ),
        _newer(int(kernel) > int(most)),
    )


def _newer(kernel_is_newer: bool) -> str:
    packages = ", ".join(distribution.read().packages(distribution.LIBIBVERBS))
    here = "this container's image" if device_files.in_container() else "this system"
    theirs = f"rdma-core{f' ({packages})' if packages else ''}"
    if kernel_is_newer:
        return (
            f"the kernel's driver is newer than {theirs} of {here}, so take a newer one: of a later release of the "
            "distribution, or "
            "what the card's vendor has for this kernel driver (the same version again does not help)"
        )
    return (
        f"the kernel's driver is older than {theirs} of {here}: take a newer kernel or driver, or an rdma-core of its "
        "time"
    )


@contextlib.contextmanager
def _caught() -> Iterator[list[str]]:
    """What this process prints to standard error meanwhile. The list is filled at the end."""
    lines: list[str] = []
    sys.stderr.flush()
    with owned(os.dup, 2) as kept, tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept.fileno(), 2)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def examine_unlisted(listed: Listed, files: list[DeviceFile], adapter: str) -> Iterator[Finding]:
    """Examine the devices that this process may open and that libibverbs does not list.

    adapter: the one that was named, or "".
    """
    for file in files:
        if file.error is not None or not file.adapter or file.adapter in listed.devices:
            continue
        if adapter and not file.is_of(adapter):
            continue
        reason, remedy = listed.misfits.get(file.adapter) or (
            "libibverbs has no driver for it",
            distribution.read().install(distribution.LIBIBVERBS),
        )
        verdict = warned if listed.devices and not adapter else failed
        yield verdict(file.adapter, f"it cannot be used: {reason}", remedy)
