"""Creates and removes software adapters on this machine's own kernel."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ndpy.platforms.verbs import distribution
from ndpy.tools.machines import SetupError, tools
from ndpy.vocabulary import system_files

# Deleting an adapter waits in the kernel until every process has closed it. Signals do not interrupt that.
_DELETE_LIMIT_S = 15.0
_CALL_LIMIT_S = 30.0

# The names of the adapters that up() created. Without names, down() removes only these.
_STATE = Path("/run/ndpy-softroce.json")


def adapters(kind: str | None = None) -> list[str]:
    """The RDMA devices of this machine that have an active port; with `kind`, only those of that driver (rxe, siw)."""
    found = [name for name in _devices() if any(map(_active, (_folder(name) / "ports").glob("*/state")))]
    return found if kind is None else [name for name in found if name in links(kind)]


def _devices() -> list[str]:
    return system_files.names(system_files.path("/sys/class/infiniband"))


def _folder(name: str) -> Path:
    return system_files.path("/sys/class/infiniband", name)


def _active(state: Path) -> bool:
    return "ACTIVE" in system_files.read(state)


def _call(command: Sequence[str], what: str, limit_s: float = _CALL_LIMIT_S) -> str:
    """Run a tool and return its output. Raises SetupError, with the tool's message, if it fails or takes too long."""
    path = tools.find(command[0])
    if path is None:
        raise SetupError(tools.explain_missing(tools.missing([command[0]])))
    process = subprocess.Popen(
        [path, *command[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        # The tool may be waiting in the kernel, where no signal reaches it. So this thread does
        # not wait for its exit.
        process.kill()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        threading.Thread(target=process.wait, daemon=True).start()
        raise SetupError(f"{what}: {' '.join(command)} did not finish within {limit_s:g} s") from None
    if process.returncode:
        raise SetupError(f"{what}: {err.strip() or out.strip() or f'exit status {process.returncode}'}")
    return out


def links(kind: str = "rxe") -> dict[str, str]:
    """The software adapters of this kind on this machine, each with its network interface."""
    return {name: _netdev(name) for name in _devices() if _kind(name) == kind}


def _kind(name: str) -> str:
    """The kind of an adapter. Devices of rxe and siw are on no bus; those of siw are iWARP adapters (RNIC)."""
    folder = _folder(name)
    if "virtual" not in folder.resolve().parts:
        return "hardware"
    return "siw" if "RNIC" in system_files.read(folder / "node_type") else "rxe"


def _netdev(name: str) -> str:
    folder = _folder(name) / "ports/1/gid_attrs/ndevs"
    return next(filter(None, (system_files.read(folder / index) for index in system_files.names(folder))), "")


def _interfaces() -> list[dict[str, Any]]:
    listed = json.loads(_call(["ip", "-json", "address", "show", "up"], "cannot list network interfaces"))
    return [entry for entry in listed if entry.get("ifname")]


def choose_netdev() -> str:
    """The first Ethernet interface that is up and has an address."""
    for entry in _interfaces():
        if entry.get("link_type") == "ether" and entry.get("addr_info"):
            return str(entry["ifname"])
    raise SetupError(
        "no network interface is up and has an address. Choose one with --netdev, or create one: "
        "ip link add veth0 type veth peer name veth1, ip address add 192.0.2.1/24 dev veth0, "
        "ip link set veth0 up, ip link set veth1 up"
    )


def _check_netdev(netdev: str) -> None:
    entry = next((entry for entry in _interfaces() if entry["ifname"] == netdev), None)
    if entry is None:
        raise SetupError(f"there is no network interface {netdev}, or it is down (remedy: ip link set {netdev} up)")
    if not entry.get("addr_info"):
        raise SetupError(f"{netdev} has no address (remedy: ip address add 192.0.2.1/24 dev {netdev})")


def require_linux() -> None:
    """Raise SetupError unless this is Linux."""
    if platform.system() != "Linux":
        raise SetupError("this works on Linux only. On Windows, `ndpy softnd` has a provider in software")


def require_root() -> None:
    """Raise SetupError unless this process may load modules and create adapters."""
    if os.geteuid() != 0:
        raise SetupError(f"this needs root: sudo {sys.executable} -m ndpy softroce ...")


def load_module(name: str = "rdma_rxe") -> None:
    """Load a kernel module. If this kernel has none, raises SetupError, which names the package that has it."""
    if system_files.path("/sys/module", name).exists():
        return
    try:
        _call(["modprobe", name], f"the module {name} cannot be loaded")
    except SetupError as error:
        release = os.uname().release
        remedy = f"{distribution.read().install_module(name, release)}, or use `ndpy vm run --vm`"
        raise SetupError(f"{error}\nkernel {release} has no {name}: {remedy}") from None


def module_available(name: str = "rdma_rxe") -> bool:
    """Whether the running kernel has the module, loaded or not."""
    if system_files.path("/sys/module", name).exists():
        return True
    modprobe = tools.find("modprobe")
    if modprobe is None:
        return False
    dry_run = [modprobe, "--dry-run", "--quiet", name]
    return subprocess.run(dry_run, capture_output=True, timeout=_CALL_LIMIT_S, check=False).returncode == 0


def _made() -> list[str]:
    try:
        return [str(name) for name in json.loads(_STATE.read_text(encoding="utf-8"))]
    except (OSError, ValueError):
        return []


def _remember(names: Sequence[str]) -> None:
    if names:
        _STATE.write_text(json.dumps(sorted(names)), encoding="utf-8")
    else:
        _STATE.unlink(missing_ok=True)


def up(netdev: str | None = None) -> tuple[str, bool]:
    """Create an rxe adapter on `netdev` unless there is one. Returns its name, and whether it was created now."""
    require_root()
    load_module()
    present = links("rxe")
    if netdev is None:
        if present:
            return next(iter(present)), False
        netdev = choose_netdev()
    else:
        _check_netdev(netdev)
    for name, interface in present.items():
        if interface == netdev:
            return name, False
    name = next(f"rxe{number}" for number in itertools.count() if not _folder(f"rxe{number}").exists())
    _call(["rdma", "link", "add", name, "type", "rxe", "netdev", netdev], f"cannot create {name} on {netdev}")
    _remember([*_made(), name])
    return name, True


def down(names: Sequence[str] = ()) -> list[str]:
    """Remove the named rxe adapters, or those that up() created. Returns the names of those that were removed.

    Raises SetupError for an adapter that is of another kind, or still in use after a while. An adapter in use
    disappears when the last process closes it.
    """
    require_root()
    present = links("rxe")
    for name in names:
        if name not in present:
            raise SetupError(f"{name} is not an rxe adapter. The rxe adapters are: {', '.join(present) or 'none'}")
    removed = []
    for name in names or [name for name in _made() if name in present]:
        what = f"{name} is still there because a process has it open. It disappears when that process closes it"
        _call(["rdma", "link", "delete", name], what, _DELETE_LIMIT_S)
        _remember([made for made in _made() if made != name])
        removed.append(name)
    return removed
