"""What ndpy tells the users of each distribution to install. tests/unit/distributions has the release files."""

import ctypes
import os
import shutil
from pathlib import Path

import pytest
from kit import linux_only as linux_only

from ndpy import ProviderNotFoundError
from ndpy.platforms.verbs import adapter_info, device_files, distribution, native_calls
from ndpy.tools.doctor import linux, linux_system
from ndpy.tools.machines import SetupError, links, tools
from ndpy.vocabulary import system_files

FOLDER = Path(__file__).with_name("distributions")
RELEASE = "6.8.0-49-generic"

# Each file with the ID that is shown and the family.
FILES = {
    "debian-12": ("debian", "debian"),
    "debian-13": ("debian", "debian"),
    "ubuntu-22.04": ("ubuntu", "ubuntu"),
    "ubuntu-24.04": ("ubuntu", "ubuntu"),
    "mint-22": ("linuxmint", "ubuntu"),
    "fedora-42": ("fedora", "fedora"),
    "rhel-9": ("rhel", "rhel"),
    "rocky-9": ("rocky", "rhel"),
    "opensuse-leap-15.6": ("opensuse-leap", ""),
    "arch": ("arch", ""),
    "unknown": ("homemade-linux", ""),
    "hostile": ("??touch??tmp?ndpy-was-here???rm?-rf???pw", ""),
}
UNKNOWN = [name for name, (_, family) in FILES.items() if not family]

DEBIAN = {
    "libibverbs": "apt-get install libibverbs1 ibverbs-providers",
    "librdmacm": "apt-get install librdmacm1",
    "rules": "apt-get install rdma-core",
    "headers": "apt-get install libibverbs-dev librdmacm-dev",
    "verbs programs": "apt-get install ibverbs-utils",
    "connection programs": "apt-get install rdmacm-utils",
    "perftest": "apt-get install perftest",
    "vm": "apt-get install busybox-static file iproute2 kmod qemu-system-x86 zstd",
}
FEDORA = {
    "libibverbs": "dnf install libibverbs",
    "librdmacm": "dnf install librdmacm",
    "rules": "dnf install rdma-core",
    "headers": "dnf install rdma-core-devel",
    "verbs programs": "dnf install libibverbs-utils",
    "connection programs": "dnf install librdmacm-utils",
    "perftest": "dnf install perftest",
    "vm": "dnf install busybox file iproute kmod qemu-system-x86-core zstd",
}
RHEL = {**FEDORA, "vm": "dnf install file iproute kmod zstd"}
COMMANDS = {"debian": DEBIAN, "ubuntu": DEBIAN, "fedora": FEDORA, "rhel": RHEL}
# For a distribution that ndpy does not know: what is missing, and the project that it is from.
UPSTREAM = {
    "libibverbs": ("libibverbs.so.1", "rdma-core"),
    "librdmacm": ("librdmacm.so.1", "rdma-core"),
    "rules": ("udev rules", "rdma-core"),
    "headers": ("headers of libibverbs and librdmacm", "rdma-core"),
    "verbs programs": ("ibv_devinfo", "rdma-core"),
    "connection programs": ("rping", "rdma-core"),
    "perftest": ("ib_send_bw", "perftest"),
    "vm": (
        "qemu-system-x86_64 from QEMU",
        "busybox from BusyBox",
        "modprobe and depmod from kmod",
        "rdma from iproute2",
    ),
}


def machine(root: Path, name: str, files: tuple[str, ...] = ()) -> Path:
    """A root folder with the release file where distributions have it: /etc/os-release leads to /usr/lib."""
    (root / "etc").mkdir()
    (root / "usr/lib").mkdir(parents=True)
    shutil.copy(FOLDER / f"{name}.txt", root / "usr/lib/os-release")
    (root / "etc/os-release").symlink_to("../usr/lib/os-release")
    for file in ("proc/sys/kernel/osrelease", *files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(RELEASE)
    return root


@pytest.fixture(params=FILES)
def here(request, tmp_path):
    """This machine has the release file. Returns its name, the root folder, and the family."""
    root = machine(tmp_path, request.param)
    with system_files.below(root):
        yield request.param, root, FILES[request.param][1]


def check(text: str, name: str, thing: str) -> None:
    """The text says how to install the thing on the distribution of this release file."""
    shown, family = FILES[name]
    assert text.isprintable()
    if family:
        assert COMMANDS[family][thing] in text
        assert "not know" not in text
        assert (f"ID_LIKE of {shown}" in text) == (name == "mint-22")
    else:
        for word in (*UPSTREAM[thing], f"says ID={shown}", "does not know this distribution's package names"):
            assert word in text
        for word in ("apt-get", "dnf", "ibverbs-providers", "libibverbs1", "iproute ", "kernel-modules"):
            assert word not in text


# The release file


def test_every_recorded_file_is_tested():
    assert {path.stem for path in FOLDER.glob("*.txt")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_the_family_and_the_shown_id(tmp_path, name):
    found = distribution.read(machine(tmp_path, name))
    assert (found.id, found.family) == FILES[name]
    assert found.file == "/etc/os-release"


def test_the_file_in_usr_counts_if_etc_has_none(tmp_path):
    root = machine(tmp_path, "fedora-42")
    (root / "etc/os-release").unlink()
    assert distribution.read(root) == distribution.Distribution("fedora", "fedora", "/usr/lib/os-release")
    (root / "etc/os-release").write_text("ID=debian\n")
    assert distribution.read(root).family == "debian"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("ID=debian", "debian"),
        ("ID='debian'\n", "debian"),
        ('  ID="debian"  \n', "debian"),
        ("ID=ubuntu\nID=fedora\n", "fedora"),
        ("ID=debian\r\n", "debian"),
        ('ID=other\nID_LIKE="nobody fedora debian"\n', "fedora"),
        ("ID=raspbian\nID_LIKE=debian\n", "debian"),
        ("#ID=debian\nVARIANT_ID=debian\nID =debian\n", ""),
        ('ID="debian\n', ""),
        ("ID=Debian\n", ""),
        ("ID=debianoid\n", ""),
        ("", ""),
    ],
)
def test_assignments_are_read_as_a_shell_reads_them(tmp_path, text, family):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text(text, newline="")
    assert distribution.read(tmp_path).family == family


@pytest.mark.parametrize("kind", ["none", "folder", "pipe", "loop", "endless"])
def test_what_is_no_release_file_is_none(tmp_path, kind):
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc/os-release"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "loop":
        path.symlink_to("os-release")
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    found = distribution.read(tmp_path)
    assert found == distribution.Distribution("", "", "")
    assert "there is no /etc/os-release" in found.install(distribution.QEMU)


def test_a_file_without_an_id_is_said_to_have_none(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/os-release").write_text("NAME=Something\n")
    assert "/etc/os-release has no ID" in distribution.read(tmp_path).install(distribution.LIBRDMACM)


# Every remedy


@pytest.mark.parametrize("thing", [thing for thing in DEBIAN if thing != "vm"])
def test_installing_a_thing(here, thing):
    text = distribution.read().install(thing)
    check(text, here[0], thing)
    # This separates an error from its remedy.
    assert "; " not in text
    assert len(text) < 250


def test_every_thing_is_in_the_table():
    things = {value for name, value in vars(distribution).items() if name.isupper() and not name.startswith("_")}
    assert set(distribution._THINGS) == things


def test_the_programs_of_the_vm(here):
    name, root, family = here
    text = tools.explain_missing(tools.FOR_VM, root)
    check(text.replace("\n", " "), name, "vm")
    for tool in tools.FOR_VM:
        assert f"  {tool} " in f"{text} ".replace("\n", " \n")
    assert "-m pip install virtme-ng" in text
    if family == "rhel":
        assert "qemu-system-x86_64 from QEMU" in text
        assert f"knows no package of {FILES[name][0]}" in text


def test_doctor_on_libraries_that_cannot_be_loaded(here, monkeypatch):
    def refuse(path):
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    found = {finding.check: finding.remedy for finding in linux.examine_libraries()}
    for library, variable in (("libibverbs", "NDPY_LIBIBVERBS"), ("librdmacm", "NDPY_LIBRDMACM")):
        check(found[library], here[0], library)
        assert found[library].endswith(f", or set {variable} to the library's path")


def test_doctor_on_drivers(here):
    name, root, family = here
    (finding,) = linux.examine_drivers()
    check(finding.remedy, name, "libibverbs")
    (root / "etc/libibverbs.d").mkdir()
    (root / "etc/libibverbs.d/mlx5.driver").write_text("driver mlx5\n")
    (finding,) = linux.examine_drivers()
    again = {"debian": "apt-get install --reinstall libibverbs1", "fedora": "dnf reinstall libibverbs"}
    again |= {"ubuntu": again["debian"], "rhel": again["fedora"], "": "from rdma-core again"}
    assert again[family] in finding.remedy


MODULE = {
    "debian": "apt-get install linux-image-amd64, and boot it (the cloud flavour has no ib_uverbs)",
    "ubuntu": f"apt-get install linux-modules-extra-{RELEASE}",
    "fedora": f"dnf install kernel-modules-{RELEASE}",
    "rhel": f"dnf install kernel-modules-{RELEASE}",
    "": f"install the module ib_uverbs (CONFIG_INFINIBAND_USER_ACCESS of Linux) for kernel {RELEASE}",
}


def test_doctor_on_kernel_modules(here):
    family = here[2]
    found = {finding.check: finding.remedy for finding in linux_system.examine_modules()}
    assert MODULE[family] in found["module ib_uverbs"]
    assert "then, as root, modprobe ib_uverbs" in found["module ib_uverbs"]


def test_doctor_in_a_container_does_not_take_its_distribution_for_the_hosts(here):
    _, root, _ = here
    (root / ".dockerenv").touch()
    found = {finding.check: finding.remedy for finding in linux_system.examine_modules()}
    for package in ("linux-modules-extra-", "linux-image-amd64 (Debian", "kernel-modules-"):
        assert package in found["module ib_uverbs"]


def test_doctor_on_a_device_file_that_is_closed_to_the_user(here, monkeypatch):
    name = here[0]

    def refuse(path, flags):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    check(linux_system._device_file(device_files.look_at("uverbs0")).remedy, name, "rules")


@pytest.mark.parametrize("library", ["libibverbs", "librdmacm"])
def test_opening_an_adapter_without_the_libraries(here, monkeypatch, library):
    monkeypatch.setattr(native_calls, "_loaded", False)
    monkeypatch.setenv(f"NDPY_{library.upper()}", "/nonexistent/library.so")
    with pytest.raises(ProviderNotFoundError) as caught:
        native_calls.load()
    remedy = str(caught.value).rpartition("; ")[2]
    check(remedy, here[0], library)


def test_a_device_file_that_may_not_be_opened(here, monkeypatch, tmp_path):
    refused = device_files.DeviceFile(tmp_path, "mlx5_0", OSError(13, "Permission denied"))
    monkeypatch.setattr(device_files, "all_files", lambda: [refused])
    monkeypatch.setattr(system_files, "shown", str)
    check(str(adapter_info._open_error("mlx5_0", 13)).rpartition("; ")[2], here[0], "rules")


def test_a_device_without_a_driver_in_user_space(here, monkeypatch):
    for file in ("sys/class/infiniband/mlx5_0/node_type", "dev/infiniband/uverbs0"):
        (here[1] / file).parent.mkdir(parents=True)
        (here[1] / file).touch()
    check(device_files.why_no_adapter().partition(": ")[2], here[0], "libibverbs")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (
            "rdma_rxe",
            {
                "debian": "linux-image-amd64, and boot it (the cloud flavour has no rdma_rxe)",
                "ubuntu": f"apt-get install linux-modules-extra-{os.uname().release}",
                "fedora": f"dnf install kernel-modules-{os.uname().release}",
                "rhel": "are built without rdma_rxe",
                "": "the module rdma_rxe (CONFIG_RDMA_RXE of Linux)",
            },
        ),
        (
            "siw",
            {
                "debian": "Debian's kernels have no siw, but `make setup`",
                "ubuntu": f"apt-get install linux-modules-extra-{os.uname().release}",
                "fedora": f"dnf install kernel-modules-{os.uname().release}",
                "rhel": f"dnf install kernel-modules-{os.uname().release}",
                "": "the module siw (CONFIG_RDMA_SIW of Linux)",
            },
        ),
    ],
)
def test_a_software_adapter_on_a_kernel_without_its_module(here, monkeypatch, module, said):
    def refuse(command, what, limit_s=0):
        raise SetupError(what)

    monkeypatch.setattr(links, "_call", refuse)
    with pytest.raises(SetupError) as caught:
        links.load_module(module)
    assert said[here[2]] in str(caught.value)
    assert "or use `ndpy vm run --vm`" in str(caught.value)


@pytest.mark.parametrize(
    ("adapter", "said"),
    [
        (
            "rxe",
            {
                "debian": "apt-get install linux-image-amd64 (its cloud flavour has no rdma_rxe)",
                "ubuntu": "apt-get install linux-image-generic",
                "fedora": "dnf install kernel-core kernel-modules",
                "rhel": "are built without rdma_rxe",
                "": "CONFIG_RDMA_RXE of Linux",
            },
        ),
        (
            "siw",
            {
                "debian": "`make setup` in a checkout of ndpy, which builds siw",
                "ubuntu": "apt-get install linux-image-generic",
                "fedora": "dnf install kernel-core kernel-modules",
                "rhel": "may have been built without siw",
                "": "CONFIG_RDMA_SIW of Linux",
            },
        ),
    ],
)
def test_a_machine_without_a_kernel_for_the_vm(here, adapter, said):
    name, root, family = here
    with pytest.raises(SetupError) as caught:
        tools.find_kernel(root=root, adapters=(adapter,), system=root)
    remedy = str(caught.value).splitlines()[-1]
    assert said[family] in remedy
    assert ("make setup" in remedy) == (family in ("debian", "ubuntu", "fedora"))
    assert ("--kernel-root" in remedy) == (family in ("rhel", ""))
    assert (f"says ID={FILES[name][0]}" in remedy) == (not family)


# Where distributions have their kernels. Modules are compressed, and /lib is a link to /usr/lib.

UBUNTU_KERNEL = (
    "usr/lib/modules/6.8.0-49-generic/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.zst",
    "usr/lib/modules/6.8.0-49-generic/kernel/drivers/infiniband/sw/siw/siw.ko.zst",
    "boot/vmlinuz-6.8.0-49-generic",
)
FEDORA_KERNEL = (
    "usr/lib/modules/6.17.7-200.fc42.x86_64/kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.xz",
    "usr/lib/modules/6.17.7-200.fc42.x86_64/kernel/drivers/infiniband/sw/siw/siw.ko.xz",
    "usr/lib/modules/6.17.7-200.fc42.x86_64/vmlinuz",
)


@pytest.fixture(params=[("ubuntu-24.04", UBUNTU_KERNEL), ("fedora-42", FEDORA_KERNEL)], ids=["ubuntu", "fedora"])
def with_kernel(request, tmp_path):
    """The root folder, and the three files of its kernel."""
    name, files = request.param
    root = machine(tmp_path, name, files)
    (root / "lib").symlink_to("usr/lib")
    return root, files


@pytest.mark.parametrize("adapters", [("rxe",), ("siw",), ("rxe", "siw")])
def test_the_kernel_of_the_distribution_is_found(with_kernel, adapters):
    root, files = with_kernel
    found = tools.find_kernel(root=root, adapters=adapters, system=root)
    assert found.version == files[0].split("/")[3]
    assert found.image.samefile(root / files[2])


def test_a_kernel_without_its_extra_modules_is_named_with_the_remedy(with_kernel):
    root, files = with_kernel
    (root / files[0]).unlink()
    with pytest.raises(SetupError, match="no module rdma_rxe"):
        tools.find_kernel(root=root, system=root)
    assert tools.find_kernel(root=root, adapters=("siw",), system=root).image.samefile(root / files[2])


def test_an_image_that_only_root_may_read_is_named_with_the_command(with_kernel, monkeypatch):
    root, files = with_kernel
    access = os.access
    monkeypatch.setattr(tools.os, "access", lambda path, mode: "vmlinuz" not in path.name and access(path, mode))
    with pytest.raises(SetupError) as caught:
        tools.find_kernel(root=root, system=root)
    image = root / files[2].replace("usr/lib", "lib")
    assert f"no permission to read its image (as root: chmod a+r {image})" in str(caught.value)


def test_a_kernel_that_was_unpacked_elsewhere_gets_the_remedy_of_this_machine(tmp_path):
    (tmp_path / "system").mkdir()
    system = machine(tmp_path / "system", "fedora-42")
    with pytest.raises(SetupError, match="dnf install kernel-core kernel-modules"):
        tools.find_kernel(root=tmp_path / "kernels", system=system)
