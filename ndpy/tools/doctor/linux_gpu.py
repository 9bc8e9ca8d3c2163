"""Examines whether adapters can reach the memory of the GPUs of this Linux machine. Without GPUs it finds nothing."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from ndpy.platforms.verbs.device_files import in_container
from ndpy.tools.doctor.findings import Finding, passed, warned
from ndpy.vocabulary import system_files
from ndpy.vocabulary.gpus import Gpu, by_distance, gpus, has_peer_module
from ndpy.vocabulary.system_files import names, path, read

_MIB = 1 << 20
# GPUs without a large BAR have 256 MiB.
_ENOUGH_BAR = 1 << 30
# Types of groups in which an IOMMU translates, of Documentation/ABI/testing/sysfs-kernel-iommu_groups.
TRANSLATED = ("DMA", "DMA-FQ")
#: What /proc/driver/nvidia/version says of the modules that export dma-bufs.
OPEN_MODULES = "Open Kernel Module"


def examine_gpus(adapter: str = "") -> Iterator[Finding]:
    """Examine the driver, what its memory can be reached by, and the way there.

    adapter: a name, to leave out other adapters.
    """
    found = gpus()
    if not found:
        return
    if not path("/sys/module/nvidia").is_dir():
        yield warned(
            "GPU driver",
            f"the module nvidia is not loaded, so no program can use the {_counted(found)} of this machine",
            "install NVIDIA's driver; then, as root: modprobe nvidia",
        )
        return
    yield _memory()
    yield _files()
    for gpu in found:
        yield _bar(gpu)
    yield _translation(found)
    for name in names(path("/sys/class/infiniband")):
        near = by_distance(name)
        if near and adapter in ("", name):
            distance, nearest = next(iter(near.items()))
            yield passed(f"{name} GPUs", f"{', '.join(gpu.function for gpu in nearest)} {distance}")


def _counted(found: list[Gpu]) -> str:
    return f"{len(found)} GPU{'s' if len(found) > 1 else ''}"


def _memory() -> Finding:
    check = "GPU memory"
    ways = []
    if OPEN_MODULES in read(path("/proc/driver/nvidia/version")):
        ways.append("by dma-bufs, which NVIDIA's open kernel modules export")
    if has_peer_module():
        ways.append("through the kernel's module for peer memory")
    if ways:
        return passed(check, f"adapters can reach it {', or '.join(ways)}")
    on_host = "on the host, " if in_container() else ""
    return warned(
        check,
        "no adapter can reach it: NVIDIA's kernel modules here are not the open ones, which export dma-bufs, and "
        "nvidia_peermem is not loaded",
        f"{on_host}as root: modprobe nvidia_peermem; or install NVIDIA's open kernel modules",
    )


def _files() -> Finding:
    check = "GPU files"
    error = system_files.refusal(path("/dev/nvidiactl"))
    if error is None:
        return passed(check, "this process may open /dev/nvidiactl")
    remedy = "give this user access to /dev/nvidia*"
    if in_container():
        remedy = "give the container the GPUs: docker run --gpus all, or nvidia.com/gpu in the pod's resources"
    elif error.errno == errno.ENOENT:
        remedy = "as root: nvidia-modprobe, which makes /dev/nvidia*"
    return warned(check, f"/dev/nvidiactl cannot be opened ({error.strerror}), so CUDA finds no GPU", remedy)


def _bar(gpu: Gpu) -> Finding:
    check = f"GPU {gpu.function}"
    size = bar_size(gpu)
    if not size:
        return warned(check, "the system does not say how large its BARs are", "look at the output of lspci -v")
    if size >= _ENOUGH_BAR:
        return passed(check, f"its largest BAR has {size // _MIB} MiB")
    return warned(
        check,
        f"its largest BAR has {size // _MIB} MiB, and adapters reach no more of its memory than that at once",
        "enable Above 4G Decoding and Resizable BAR in the machine's firmware; some cards have no larger one",
    )


def bar_size(gpu: Gpu) -> int:
    """How many bytes the largest region of a GPU's addresses has. 0 if the system does not say."""
    ranges = re.findall(r"^0x([0-9a-f]{1,16}) 0x([0-9a-f]{1,16}) ", read(gpu.folder / "resource"), re.MULTILINE)
    return max((int(end, 16) + 1 - int(start, 16) for start, end in ranges if end != start), default=0)


def _translation(found: list[Gpu]) -> Finding:
    check = "GPU IOMMU"
    translated = [gpu.function for gpu in found if read(gpu.folder / "iommu_group/type") in TRANSLATED]
    if not translated:
        return passed(check, "no IOMMU translates what adapters and GPUs transfer to each other")
    return warned(
        check,
        f"an IOMMU translates what {', '.join(translated)} transfer to other devices, which then goes by the host "
        f"bridge, or fails",
        "on a machine of your own, put iommu=pt on the kernel's command line",
    )
