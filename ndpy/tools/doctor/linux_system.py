"""Examines the kernel, the device files and the limits of this process, as far as RDMA needs them."""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from ndpy.platforms.verbs import device_files, distribution
from ndpy.platforms.verbs.device_files import DeviceFile, in_container
from ndpy.platforms.verbs.memory import MEMLOCK_REMEDY
from ndpy.tools.doctor.findings import Finding, examine, failed, passed, warned
from ndpy.vocabulary.system_files import names, path, read, read_number, shown

_MIB = 1 << 20
# Many adapters pin and count a queue pair's own rings, so even the first one may fail with less than this.
_LEAST_MEMLOCK = _MIB
_ENOUGH_MEMLOCK = 1024 * _MIB
# An open adapter has one thread for events and up to four for registrations.
_ENOUGH_THREADS = 16
_ENOUGH_MEMORY = 256 * _MIB
# An adapter, a completion queue, a queue pair and a listener of soft0 take this many file descriptors together.
_LEAST_FILES = 16
_ENOUGH_FILES = 256
_NOFILE_REMEDY = (
    "raise it with `ulimit -n NUMBER`, 'nofile' in /etc/security/limits.conf, LimitNOFILE= of a systemd unit, or "
    "`docker run --ulimit nofile=NUMBER`"
)
# Version 1 of the memory controller says "no limit" with the largest multiple of the page size.
_NO_LIMIT = 1 << 62

_CAP_IPC_LOCK = 14
_WHOLE_MACHINE = ["0", "0", "4294967295"]

_ELSEWHERE = "where that cannot be, `ndpy vm run --vm -- COMMAND` runs a command in a small machine that has an adapter"


def examine_system(adapter: str = "") -> list[Finding]:
    """Run all examinations of this module. adapter: whose device file is wanted."""
    parts: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("kernel modules", examine_modules),
        ("device files", functools.partial(examine_device_files, adapter)),
        ("locked memory", examine_memlock),
        ("open files", examine_nofile),
        ("control group", examine_control_groups),
        ("huge pages", examine_huge_pages),
        ("container", examine_container),
    )
    return [finding for check, part in parts for finding in examine(check, part)]


def examine_modules() -> Iterator[Finding]:
    """Examine the modules behind /dev/infiniband, and those of software adapters."""
    for module, purpose in (("ib_uverbs", "verbs"), ("rdma_ucm", "connections")):
        check = f"module {module}"
        state = module_state(module)
        if state == "loaded":
            yield passed(check, f"loaded, so that programs can use {purpose}")
        elif state == "available":
            yield failed(check, f"not loaded, so no program can use {purpose}", f"as root: modprobe {module}")
        else:
            release = kernel_release()
            remedy = (
                f"{distribution.read().install_module(module, release)}; then, as root, modprobe {module}; {_ELSEWHERE}"
            )
            if in_container():
                package = distribution.module_packages(release)
                remedy = f"on the host, as root: modprobe {module} (in the package {package}); {_ELSEWHERE}"
            yield failed(check, f"neither loaded nor in /lib/modules, so no program can use {purpose}", remedy)
    states = [f"{module} is {module_state(module)}" for module in ("rdma_rxe", "siw")]
    yield passed("software adapters", " and ".join(states))


def module_state(module: str) -> str:
    """ "loaded", "available" or "absent"."""
    folder = path("/lib/modules", kernel_release())
    if device_files.is_loaded(module) or f"/{module}.ko" in read(folder / "modules.builtin"):
        return "loaded"
    return "available" if re.search(rf"/{module}\.ko[.\w]*:", read(folder / "modules.dep")) else "absent"


def kernel_release() -> str:
    """The release of the running kernel."""
    return read(path("/proc/sys/kernel/osrelease")) or os.uname().release


def examine_device_files(adapter: str = "") -> Iterator[Finding]:
    """Examine whether the device files exist and this process may open them.

    adapter: a name, whose file is wanted. Otherwise, where one file can be opened, those that were not given to this
    process are for others.
    """
    files = device_files.all_files()
    named = [file for file in files if file.is_of(adapter)]
    connections = device_files.look_at("rdma_cm")
    if not named and all(file.error is not None and file.error.errno == errno.ENOENT for file in files):
        reason, remedy = device_files.why_none(files)
        yield failed("device files", f"there is no /dev/infiniband/uverbs*: {reason}", remedy)
        if connections.error is None:
            yield _device_file(connections)
        return
    others = device_files.of_others(files, adapter)
    withheld = [file for file in others if file.is_withheld]
    for file in named or files:
        if file not in withheld:
            yield _device_file(file, warned if file in others else failed)
    if withheld and not named:
        known = ", ".join(file.adapter or file.place.name for file in withheld)
        yield passed("other adapters", f"the kernel has {known} too, whose device files this process was not given")
    yield _device_file(connections)


def _device_file(file: DeviceFile, verdict: Callable[[str, str, str], Finding] = failed) -> Finding:
    """verdict: that of a file that the rights of this user do not suffice for. Another failure is one."""
    check = shown(file.place)
    if file.error is None:
        of = f"{file.adapter}'s, " if file.adapter else ""
        return passed(check, f"{of}and this process may open it" if of else "there, and this process may open it")
    if file.error.errno != errno.EACCES:
        verdict = failed
    return verdict(check, *device_files.why_refused(file))


def examine_memlock() -> Iterator[Finding]:
    """Examine how much memory this process may pin. Registered memory is pinned."""
    check = "locked memory"
    limits = _limits("locked memory")
    if limits is None:
        yield warned(check, "/proc/self/limits does not say how much may be pinned", "mount /proc")
        return
    soft, hard = limits
    status = _status()
    pinned = sum(int(status.get(name, "0").split()[0]) for name in ("VmPin", "VmLck"))
    if soft == "unlimited":
        yield passed(check, "RLIMIT_MEMLOCK is unlimited")
    elif _exempt(status):
        yield passed(check, f"RLIMIT_MEMLOCK is {_size(int(soft))}, from which this process is exempt (CAP_IPC_LOCK)")
    elif int(soft) >= _ENOUGH_MEMLOCK:
        yield passed(check, f"RLIMIT_MEMLOCK is {_size(int(soft))}, of which {pinned} KiB are pinned")
    else:
        verdict = failed if int(soft) < _LEAST_MEMLOCK else warned
        more = "" if hard == soft else f" (this process may go to {hard if hard == 'unlimited' else _size(int(hard))})"
        yield verdict(
            check,
            f"RLIMIT_MEMLOCK is {_size(int(soft))}, of which {pinned} KiB are pinned: no more memory than that can be "
            f"registered",
            f"{MEMLOCK_REMEDY}{more}",
        )


def _limits(what: str) -> tuple[str, str] | None:
    """The soft and the hard limit of this process, each a number or "unlimited"."""
    match = re.search(rf"^Max {what}\s+(\w+)\s+(\w+)", read(path("/proc/self/limits")), re.MULTILINE)
    return None if match is None else (match[1], match[2])


def examine_nofile() -> Iterator[Finding]:
    """Examine how many files this process may have open. Adapters, completion queues and sockets are such files."""
    check = "open files"
    limits = _limits(check)
    if limits is None:
        yield warned(check, "/proc/self/limits does not say how many may be open", "mount /proc")
        return
    soft, hard = limits
    if soft == "unlimited":
        yield passed(check, "RLIMIT_NOFILE is unlimited")
        return
    taken = len(names(path("/proc/self/fd")))
    message = f"RLIMIT_NOFILE is {soft}, of which {taken} are taken"
    left = int(soft) - taken
    if left >= _ENOUGH_FILES:
        yield passed(check, message)
        return
    more = "" if hard == soft else f" (this process may go to {hard})"
    verdict, so = (
        (failed, "an adapter may not open") if left < _LEAST_FILES else (warned, "a server of many peers needs more")
    )
    yield verdict(check, f"{message}: {so}", f"{_NOFILE_REMEDY}{more}")


def _status() -> dict[str, str]:
    pairs = (line.partition(":") for line in read(path("/proc/self/status")).splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _exempt(status: dict[str, str]) -> bool:
    """Return whether this process is exempt: it has the capability on the whole machine, not only in a user
    namespace.
    """
    capable = int(status.get("CapEff", "0"), 16) >> _CAP_IPC_LOCK & 1
    return bool(capable) and read(path("/proc/self/uid_map")).split() == _WHOLE_MACHINE


def _size(octets: int) -> str:
    return f"{octets // 1024} KiB" if octets < 10 * _MIB else f"{octets // _MIB} MiB"


def control_group_files(controller: str, name: str) -> list[Path]:
    """Return the files `name` of this process's control group and of all groups above it, its own first.

    Version 2 has one tree. Version 1 has one for each controller, and may have version 2's beside them as "unified".
    """
    base = path("/sys/fs/cgroup")
    found: list[Path] = []
    for line in read(path("/proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        tops = [base, base / "unified"] if not controllers else [base / controllers, base / controller]
        if controllers and controller not in controllers.split(","):
            continue
        folder = Path(group.lstrip("/"))
        # A container may see the host's path. Then the part of it that exists counts.
        for part in (folder, *folder.parents):
            found += [file for top in tops if (file := top / part / name).is_file() and file not in found]
    return found


def examine_control_groups() -> Iterator[Finding]:
    """Examine the limits on RDMA objects, threads and memory."""
    yield from _rdma_limits()
    yield _counted(
        "pids", ("pids.max",), "pids.current", _ENOUGH_THREADS, str, "threads", "an open adapter has up to five"
    )
    files = ("memory.max", "memory.limit_in_bytes")
    yield _counted("memory", files, "", _ENOUGH_MEMORY, _size, "memory", "pinned memory counts and cannot be reclaimed")


def _rdma_limits() -> Iterator[Finding]:
    limits: dict[tuple[str, str], tuple[int, int, Path]] = {}
    for file in control_group_files("rdma", "rdma.max"):
        used = dict(_rdma_values(file.with_name("rdma.current")))
        for key, value in _rdma_values(file):
            left, now = value - used.get(key, 0), used.get(key, 0)
            if key not in limits or left < limits[key][0] - limits[key][1]:
                limits[key] = (value, now, file)
    others = {file.adapter for file in device_files.of_others(device_files.all_files())}
    limits = {key: limit for key, limit in limits.items() if key[0] not in others}
    if not limits:
        yield passed("rdma control group", "no limit of RDMA objects")
    for (device, what), (value, now, file) in limits.items():
        remedy = f"{'on the host, ' if in_container() else ''}as root: write '{device} {what}=max' to {shown(file)}"
        if in_container():
            remedy += " of this container's group (its own /sys is read-only)"
        thing = "open adapters" if what == "hca_handle" else "objects"
        verdict = failed if now >= value else warned
        yield verdict("rdma control group", f"{device}: {now} of at most {value} {thing} are in use", remedy)


def _rdma_values(file: Path) -> Iterator[tuple[tuple[str, str], int]]:
    for line in read(file).splitlines():
        device, *pairs = line.split()
        for pair in pairs:
            name, _, value = pair.partition("=")
            if value.isdigit():
                yield (device, name), int(value)


def _counted(
    controller: str,
    files: tuple[str, ...],
    current: str,
    enough: int,
    show: Callable[[int], str],
    what: str,
    why: str,
) -> Finding:
    check = f"{controller} control group"
    tightest: tuple[int, int, int, Path] | None = None
    for name in files:
        for file in control_group_files(controller, name):
            limit = read_number(file)
            usage = file.with_name(current or {"memory.max": "memory.current"}.get(name, "memory.usage_in_bytes"))
            if limit is not None and limit < _NO_LIMIT:
                now = read_number(usage) or 0
                if tightest is None or limit - now < tightest[0]:
                    tightest = limit - now, now, limit, file
    if tightest is None:
        return passed(check, f"no limit of {what}")
    left, now, limit, file = tightest
    message = f"{show(now)} of at most {show(limit)} of {what} in use"
    if left >= enough:
        return passed(check, message)
    remedy = f"raise {shown(file)} ({why})"
    if device_files.in_pod():
        setting = (
            "podPidsLimit of the kubelet" if controller == "pids" else f"resources: limits: {controller}: of the pod"
        )
        remedy = f"raise {setting} ({why})"
    elif in_container():
        remedy = f"docker run --{controller}{'-limit' if controller == 'pids' else ''}=… ({why})"
    return warned(check, message, remedy)


def examine_huge_pages() -> Iterator[Finding]:
    """Examine the pool that alloc(huge_pages=True) takes pages from."""
    fields = (line.split() for line in read(path("/proc/meminfo")).splitlines())
    values = {words[0].rstrip(":"): int(words[1]) for words in fields if len(words) > 1 and words[1].isdigit()}
    total, free, size = (values.get(name, 0) for name in ("HugePages_Total", "HugePages_Free", "Hugepagesize"))
    if not total:
        yield passed(
            "huge pages",
            "none reserved; alloc(huge_pages=True) would need some (sysctl vm.nr_hugepages=NUMBER reserves)",
        )
    elif free:
        yield passed("huge pages", f"{free} of {total} free, of {size} KiB each")
    else:
        yield warned(
            "huge pages",
            f"all {total} of {size} KiB each are taken",
            "as root: sysctl vm.nr_hugepages=NUMBER reserves more",
        )


def examine_container() -> Iterator[Finding]:
    """Examine whether a container was given what RDMA needs."""
    sign = in_container()
    if not sign:
        yield passed("container", "no sign of one")
        return
    lacking, remedies = [], []
    files = device_files.all_files()
    if not any(file.error is None for file in files):
        lacking.append("no device file of an adapter")
        remedies.append(device_files.give(files))
    limits = _limits("locked memory")
    if not _exempt(_status()) and limits is not None and limits[0] != "unlimited":
        lacking.append("little memory to pin")
        remedies.append(
            "let the container runtime's service have LimitMEMLOCK=infinity"
            if device_files.in_pod()
            else "docker run --ulimit memlock=-1"
        )
    if lacking:
        if not device_files.in_pod():
            remedies.append("--network=host, since adapters belong to the host's network namespace")
        yield warned(
            "container",
            f"this looks like one ({sign}), and it was given {' and '.join(lacking)}",
            ", and ".join(remedies),
        )
    else:
        yield passed("container", f"this looks like one ({sign}); it was given a device file and memory to pin")
