"""Describes an adapter's link on Linux, from /sys, /proc and two questions to the kernel about the network interface.

Nothing here raises because of the contents of a file. If they differ from the kernel's documentation, the value is
unknown.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from ndpy.platforms.verbs.adapter_info import describe, folder_of, open_context
from ndpy.platforms.verbs.endpoint import best_gid
from ndpy.platforms.verbs.interfaces import Interfaces, is_name
from ndpy.platforms.verbs.native_calls import lib
from ndpy.tools.doctor.link import PRIORITIES, LinkDescription, has_path_mtu, plain_description
from ndpy.vocabulary import netlink
from ndpy.vocabulary.info import AdapterInfo, Gid, PortInfo, port_in_use
from ndpy.vocabulary.system_files import path, read, read_number


def look_up(name: str) -> AdapterInfo:
    """What the adapter of this name says about itself now."""
    context = open_context(name)
    try:
        return describe(context, name)
    finally:
        lib.ibv_close_device(context)


def read_link(
    info: AdapterInfo,
    gid_index: int | None = None,
    pause_of: Callable[[str], tuple[bool, bool] | None] | None = None,
    pfc_of: Callable[[str], tuple[int, ...] | None] | None = None,
) -> LinkDescription:
    """Describe the link.

    pause_of, pfc_of: who is asked about the pause frames and the flow control of an interface. By default it is the
        kernel.
    """
    pause_of, pfc_of = pause_of or pause_frames, pfc_of or flow_control
    port = port_in_use(info)
    gid = _gid(info, port, gid_index)
    plain = plain_description(info, port, gid)
    ports = folder_of(info.name) / "ports" / str(plain.port)
    netdev = plain.netdev
    if gid is not None:
        netdev = _line(ports / "gid_attrs/ndevs" / str(gid.index)) or netdev
    if netdev is not None and not is_name(netdev):
        netdev = None
    here = Interfaces()
    physical = _below(netdev, here) if netdev else None
    pause = pause_of(physical) if physical else None
    return dataclasses.replace(
        plain,
        speed=_line(ports / "rate"),
        netdev=netdev,
        link_mtu=_mtu(netdev),
        physical=physical,
        physical_mtu=_mtu(physical),
        vlan=here.vlan_of(netdev) if netdev and plain.link_layer != "InfiniBand" else None,
        pfc=pfc_of(physical) if physical else None,
        pause_receive=pause[0] if pause else None,
        pause_send=pause[1] if pause else None,
        ecn_notification=_switches(path("/sys/class/net", physical, "ecn/roce_np/enable")) if physical else None,
        ecn_reaction=_switches(path("/sys/class/net", physical, "ecn/roce_rp/enable")) if physical else None,
        traffic_class=_traffic_class(info.name, plain.port),
    )


def _gid(info: AdapterInfo, port: PortInfo | None, index: int | None) -> Gid | None:
    if port is None or not has_path_mtu(info.transport):
        return None
    if index is not None:
        return next((gid for gid in port.gids if gid.index == index), None)
    return best_gid(info, port)


# ---- files ----


def _line(place: Path) -> str | None:
    """The only line of a file. None if the file has none, or other than plain characters."""
    text = read(place)
    return text if text and text.isascii() and text.isprintable() else None


def _mtu(netdev: str | None) -> int | None:
    return read_number(path("/sys/class/net", netdev, "mtu")) if netdev else None


def _below(netdev: str, here: Interfaces) -> str:
    """The interface that a VLAN's interface lies on, or else the interface itself."""
    lower = here.below(netdev) if here.kind_of(netdev) == "vlan" else []
    return lower[0] if len(lower) == 1 and is_name(lower[0]) else netdev


def _switches(folder: Path) -> tuple[int, ...] | None:
    """The priorities whose file in this folder says 1. None unless every priority has a file that says 0 or 1."""
    values = [read_number(folder / str(priority)) for priority in range(PRIORITIES)]
    if any(value not in (0, 1) for value in values):
        return None
    return tuple(priority for priority, value in enumerate(values) if value)


def _traffic_class(adapter: str, port: int | None) -> int | None:
    # An administrator makes this folder. Without it, librdmacm's default is what the kernel was built with.
    value = read_number(path("/sys/kernel/config/rdma_cm", adapter, "ports", str(port), "default_roce_tos"))
    return value if value is not None and value <= 255 else None


# ---- questions to the kernel ----

_SIOCETHTOOL = 0x8946
_ETHTOOL_GPAUSEPARAM = 0x12


def pause_frames(netdev: str) -> tuple[bool, bool] | None:
    """Whether an interface obeys pause frames, and whether it sends them. None if its driver does not say.

    Source: linux/ethtool.h, struct ethtool_pauseparam.
    """
    answer = ctypes.create_string_buffer(struct.pack("=4I", _ETHTOOL_GPAUSEPARAM, 0, 0, 0), 16)
    # struct ifreq: the name, and a union of 24 bytes that begins with the pointer.
    request = struct.pack("16sP", netdev.encode(), ctypes.addressof(answer)).ljust(40, b"\0")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            fcntl.ioctl(asked, _SIOCETHTOOL, request)
    except OSError:
        return None
    _, _, receive, send = struct.unpack("=4I", answer.raw)
    return bool(receive), bool(send)


_RTM_GETDCB = 78
_DCB_HEAD = struct.Struct("=BBH")
_DCB_CMD_IEEE_GET = 21
_DCB_ATTR_IFNAME = 1
_DCB_ATTR_IEEE = 13
_DCB_ATTR_IEEE_PFC = 2


def flow_control(netdev: str) -> tuple[int, ...] | None:
    """The priorities for which an interface has priority flow control. None if its driver does not say.

    Source: linux/dcbnl.h; dcb(8) asks the same.
    """
    body = _DCB_HEAD.pack(socket.AF_UNSPEC, _DCB_CMD_IEEE_GET, 0)
    body += netlink.attribute(_DCB_ATTR_IFNAME, netdev.encode() + b"\0")
    return parse_flow_control(netlink.ask(_RTM_GETDCB, body))


def parse_flow_control(answer: bytes) -> tuple[int, ...] | None:
    """The priorities in the kernel's answer. None if the answer is an error, or has none."""
    ieee = dict(netlink.answered(answer, _RTM_GETDCB, _DCB_HEAD.size)).get(_DCB_ATTR_IEEE, b"")
    # struct ieee_pfc: how many priorities can have it, which have it, and more.
    value = dict(netlink.attributes(ieee)).get(_DCB_ATTR_IEEE_PFC, b"")
    if len(value) < 2:
        return None
    return tuple(priority for priority in range(PRIORITIES) if value[1] >> priority & 1)
