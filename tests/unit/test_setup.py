"""rig/system.sh on each distribution: what it installs, which kernel it takes, and what it says where it cannot go on.

The package managers are stand-ins that answer from lists. apt's answers are as Debian's and Ubuntu's give them, dnf's
as its manual says. The scripts run as another user than root, since root may read every file.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from kit import linux_only as linux_only
from kit.rig import RIG

from ndpy.platforms.verbs import distribution
from ndpy.tools.machines import tools

RELEASES = Path(__file__).with_name("distributions")
NOBODY = 65534
LIMIT_S = 60

# One program for all stand-ins. `$answers` has: installed and available, lists of names; depends-NAME and kernel-core,
# what the archive says; archive/NAME, a tar or cpio file. It writes what it was asked to `$answers/log`.
STAND_IN = r"""#!/bin/sh
name=$(basename "$0")
echo "$name $*" >>"$answers/log"
has() { grep -q -x -F -e "$2" "$answers/$1"; }
for last; do :; done
case "$name $1 ${2:-}" in
"id "*) cat "$answers/uid" ;;
"sudo "*) exec "$@" ;;
"depmod "*) ! [ -e "$answers/cut-off" ] ;;
"uname "*) cat "$answers/machine" ;;
"dpkg "*) cat "$answers/architecture" ;;
"dpkg-query "*) if has installed "$last"; then echo installed; else exit 1; fi ;;
"apt-cache show "*) if has available "$last"; then echo "Filename: pool/$last.deb"; else exit 100; fi ;;
"apt-cache depends "*) cat "$answers/depends-$last" 2>/dev/null || exit 100 ;;
"apt-get -qq update" | "dnf -q makecache") ;;
"apt-get -qq download" | "dnf -q download")
    shift 2
    for package; do
        if [ "$name" = dnf ]; then end=rpm; else end=deb; fi
        cp "$answers/archive/$package" "./$package.$end" || { echo "E: no $package" >&2; exit 100; }
    done
    ;;
"dpkg-deb -x "*) tar -x -f "$2" -C "$3" ;;
"rpm2cpio "*) cat "$1" ;;
"rpm "*) has installed "$last" ;;
"dnf -q repoquery")
    if [ "$last" = kernel-core ]; then cat "$answers/kernel-core" 2>/dev/null; exit; fi
    if has available "$last"; then echo "$last-0:1-1.x86_64"; fi
    ;;
*)
    case " $* " in *" install "*) ;; *) echo "nobody expected $name $*" >&2; exit 99 ;; esac
    ! [ -e "$answers/refuse" ] || { echo "E: unable to fetch some archives"; exit 100; }
    ;;
esac
"""
# The programs of every distribution's smallest installation that the scripts use.
ORDINARY = [
    "basename",
    "cat",
    "chmod",
    "cp",
    "cut",
    "echo",
    "grep",
    "head",
    "ls",
    "mkdir",
    "mv",
    "readlink",
    "rm",
    "sed",
    "sh",
    "sort",
    "strip",
    "tail",
    "tar",
    "touch",
    "tr",
    "xz",
    "cpio",
    "make",
]
MANAGERS = {
    "apt": ("apt-get", "apt-cache", "dpkg", "dpkg-query", "dpkg-deb"),
    "dnf": ("dnf", "rpm", "rpm2cpio"),
}


def names(column: int) -> list[str]:
    """The names in a column of packages.txt."""
    lines = (line.partition("#")[0].split() for line in (RIG / "packages.txt").read_text().splitlines())
    return [line[column] for line in lines if line and line[column] != "-"]


@dataclass
class Machine:
    """A root folder with a release file, and the stand-ins of a package manager."""

    folder: Path

    def __getattr__(self, name: str) -> Path:
        return self.folder / name

    def write(self, name: str, text: str = "") -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def stand_in(self, *programs: str) -> None:
        for program in programs:
            self.write(f"bin/{program}", STAND_IN).chmod(0o755)

    def archive(self, package: str, *files: str, cpio: bool = False) -> None:
        """Put a package with these files into the archive."""
        tree = self.folder / "content" / package
        for file in files:
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            (tree / file).write_text(f"{package}: {file}")
        target = self.folder / "answers/archive" / package
        target.parent.mkdir(exist_ok=True)
        if cpio:
            made = subprocess.run(
                "find . | cpio -o -H newc --quiet", shell=True, cwd=tree, capture_output=True, check=True
            )
            target.write_bytes(made.stdout)
        else:
            subprocess.run(["tar", "-c", "-f", target, "-C", tree, "."], check=True)
        with (self.folder / "answers/available").open("a") as file:
            file.write(f"{package}\n")

    def run(self, script: str) -> subprocess.CompletedProcess[str]:
        """Run shell commands with the functions of system.sh."""
        begin = (
            f'set -eu; rig={self.folder}/rig; state={self.folder}/state; eval "$(grep "^say()\\|^die()" '
            '$rig/setup.sh)"; '
        )
        account = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
        if account:
            for path in [self.folder, *self.folder.rglob("*")]:
                os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        return subprocess.run(
            ["/bin/sh", "-c", f'{begin}. "$rig/system.sh"; {script}'],
            cwd=self.folder / "state",
            env={
                "PATH": f"{self.folder}/bin",
                "NDPY_SETUP_ROOT": str(self.folder / "root"),
                "answers": str(self.folder / "answers"),
            },
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            **account,
        )

    def log(self) -> list[str]:
        return (self.folder / "answers/log").read_text().splitlines()

    def asked(self, program: str) -> list[str]:
        return [line for line in self.log() if line.startswith(f"{program} ")]


@contextlib.contextmanager
def machine(release: str, manager: str = ""):
    """Make a Machine without packages or kernels. Other users cannot enter pytest's folders."""
    with tempfile.TemporaryDirectory() as folder:
        made = Machine(Path(folder))
        for name in ("root/etc", "root/lib/modules", "root/boot", "bin", "state", "answers"):
            (made.folder / name).mkdir(parents=True)
        shutil.copytree(RIG, made.folder / "rig", ignore=shutil.ignore_patterns("windows"))
        shutil.copy(RELEASES / f"{release}.txt", made.folder / "root/etc/os-release")
        for name in ("installed", "available", "log"):
            made.write(f"answers/{name}")
        made.write("answers/uid", "1000\n")
        made.write("answers/machine", "x86_64\n")
        made.write("answers/architecture", "amd64\n")
        for program in ORDINARY:
            path = shutil.which(program)
            if path is not None:
                (made.folder / "bin" / program).symlink_to(path)
        made.stand_in("id", "sudo", "depmod", "uname", *MANAGERS.get(manager, ()))
        yield made


@pytest.fixture(params=["debian-13", "ubuntu-24.04", "fedora-42"])
def known(request):
    """A machine with a distribution that setup.sh knows, and the column of its names."""
    manager = "dnf" if request.param == "fedora-42" else "apt"
    with machine(request.param, manager) as made:
        yield made, 1 if manager == "dnf" else 0


# The distribution


@pytest.mark.parametrize("release", sorted(path.stem for path in RELEASES.glob("*.txt")))
def test_the_script_and_ndpy_see_the_same_family(release):
    with machine(release, "apt") as made:
        made.stand_in(*MANAGERS["dnf"])
        done = made.run('echo "family=$(family) $manager"')
        expected = distribution.read(made.root).family
        if expected in ("debian", "ubuntu", "fedora"):
            manager = "dnf" if expected == "fedora" else "apt-get"
            assert (done.stdout, done.stderr) == (f"family={expected} {manager}\n", "")
        else:
            assert done.returncode == 1
            assert done.stdout == ""


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("arch", "/etc/os-release says ID=arch"),
        ("opensuse-leap-15.6", "/etc/os-release says ID=opensuse-leap"),
        ("unknown", "/etc/os-release says ID=homemade-linux"),
        ("hostile", "/etc/os-release says ID=???touch"),
        (None, "there is no ID in /etc/os-release"),
    ],
)
def test_a_distribution_that_nobody_knows_gets_a_clear_answer(release, said):
    with machine(release or "arch") as made:
        if release is None:
            (made.root / "etc/os-release").unlink()
        done = made.run("install_packages; provide_kernel")
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert f"this is for Debian, Ubuntu and Fedora, but {said}" in line
        assert "rig/packages.txt" in line
        assert "kernel with rdma_rxe" in line
        assert len(line) < 400
        assert line.isprintable()
        assert made.asked("apt-get") + made.asked("dnf") + made.asked("sudo") == []
        assert not Path("/tmp/ndpy-was-here").exists()


@pytest.mark.parametrize("release", ["rhel-9", "rocky-9"])
def test_rhel_is_told_what_it_lacks(release):
    with machine(release, "dnf") as made:
        done = made.run("install_packages")
        assert done.returncode == 1
        assert "kernels without rdma_rxe" in done.stderr
        assert made.asked("dnf") == []


# Packages


def test_soft0_needs_only_what_builds_it(known):
    made, _ = known
    done = made.run("wanted_packages build; echo; wanted_packages")
    few, every = done.stdout.split("\n\n")
    assert {"gcc", "make", "python3"} < set(few.split())
    assert not {"wine", "wine-core", "kmod", "cpio"} & set(few.split())
    assert every.split()[: len(few.split())] == few.split() and len(every.split()) > 2 * len(few.split())


def test_each_line_of_the_list_has_a_name_for_each_package_manager():
    for line in (RIG / "packages.txt").read_text().splitlines():
        words = line.partition("#")[0].split()
        assert len(words) in (0, 2), line


@pytest.mark.parametrize("manager", ["apt", "dnf"])
def test_the_list_has_what_ndpy_asks_for_in_its_remedies(manager):
    family, column = ("fedora", 1) if manager == "dnf" else ("debian", 0)
    listed = {name.rstrip("?") for name in names(column)}
    for thing in distribution._THINGS:
        packages = distribution.Distribution(family, family, "").packages(thing)
        # These come with the programs and headers that need them.
        assert set(packages) - {"libibverbs1", "librdmacm1", "librdmacm"} <= listed, thing


def test_all_packages_are_installed_at_once(known):
    made, column = known
    optional = [name for name in names(column) if name.endswith("?")]
    made.write("answers/available", "".join(f"{name[:-1]}\n" for name in optional[:1]))
    done = made.run("install_packages")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in made.log() if not line.startswith("sudo ") and " install " in line]
    options = "-o Dpkg::Use-Pty=0 install --no-install-recommends -y", "-y --setopt=install_weak_deps=False install"
    wanted = [name for name in names(column) if not name.endswith("?")]
    wanted += [name[:-1] for name in optional[:1]]
    program, _, packages = line.partition(f" {options[column]} ")
    assert program == ("apt-get -qq", "dnf -q")[column]
    assert sorted(packages.split()) == sorted(wanted)
    assert [line for line in made.asked("sudo") if " install " in line] == [f"sudo {line}"]


def test_only_what_is_missing_is_installed(known):
    made, column = known
    there = [name.rstrip("?") for name in names(column)]
    made.write("answers/installed", "".join(f"{name}\n" for name in there if name != "perftest"))
    assert made.run("install_packages").returncode == 0
    (line,) = [line for line in made.log() if not line.startswith("sudo ") and " install " in line]
    assert line.endswith((" install perftest", " -y perftest"))


def test_nothing_is_asked_of_the_archive_if_all_is_there(known):
    made, column = known
    made.write("answers/installed", "".join(f"{name.rstrip('?')}\n" for name in names(column)))
    done = made.run("install_packages")
    assert (done.returncode, done.stderr) == (0, "")
    assert made.asked("sudo") == []


def test_root_needs_no_sudo(known):
    made, _ = known
    made.write("answers/uid", "0\n")
    (made.bin / "sudo").unlink()
    assert made.run("install_packages").returncode == 0


def test_without_root_and_sudo_it_says_so(known):
    made, _ = known
    (made.bin / "sudo").unlink()
    done = made.run("install_packages")
    assert (done.returncode, done.stderr) == (1, "setup: run this as root, or install sudo\n")


def test_another_processor_is_refused(known):
    made, _ = known
    made.write("answers/machine", "aarch64\n")
    made.write("answers/architecture", "arm64\n")
    done = made.run("install_packages")
    assert (done.returncode, done.stderr) == (1, "setup: the VM is made for amd64 only\n")


def test_a_distribution_without_its_package_manager_is_told(known):
    made, column = known
    program = ("apt-get", "dnf")[column]
    (made.bin / program).unlink()
    done = made.run("install_packages")
    assert (done.returncode, done.stderr) == (1, f"setup: {program} is missing; install what rig/packages.txt lists\n")


def test_what_the_package_manager_says_is_shown_if_it_fails(known):
    made, _ = known
    made.write("answers/refuse")
    done = made.run("install_packages")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2:] == [
        "E: unable to fetch some archives",
        "setup: the packages could not be installed",
    ]


# Kernels

DEBIAN = "6.12.48+deb13-amd64"
UBUNTU = "6.8.0-49-generic"
FEDORA = "6.17.7-200.fc42.x86_64"
RXE = "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko"
SIW = "kernel/drivers/infiniband/sw/siw/siw.ko"


def kernel_there(made: Machine, version: str, end: str, image: str, *, siw: bool = True) -> Path:
    """Give the machine a kernel. Returns its image."""
    made.write(f"root/lib/modules/{version}/{RXE}{end}")
    if siw:
        made.write(f"root/lib/modules/{version}/{SIW}{end}")
    return made.write(f"root/{image}", "image")


def archive_of(made: Machine, release: str) -> None:
    """Fill the archive with the kernel packages that the distribution has."""
    if release == "debian-13":
        made.archive(f"linux-image-{DEBIAN}", f"boot/vmlinuz-{DEBIAN}", f"usr/lib/modules/{DEBIAN}/{RXE}.xz")
        made.write("answers/depends-linux-image-amd64", f"linux-image-amd64\n  Depends: linux-image-{DEBIAN}\n")
    elif release == "ubuntu-24.04":
        made.archive(f"linux-image-{UBUNTU}", f"boot/vmlinuz-{UBUNTU}")
        made.archive(f"linux-modules-{UBUNTU}", f"lib/modules/{UBUNTU}/kernel/drivers/net/veth.ko.zst")
        made.archive(f"linux-modules-extra-{UBUNTU}", *(f"lib/modules/{UBUNTU}/{file}.zst" for file in (RXE, SIW)))
        made.write(
            "answers/depends-linux-image-generic",
            f"linux-image-generic\n  Depends: linux-image-{UBUNTU}\n  Depends: linux-modules-extra-{UBUNTU}\n"
            "  Depends: linux-firmware\n  Depends: intel-microcode\n  Depends: amd64-microcode\n",
        )
    else:
        made.archive(f"kernel-core-{FEDORA}", f"lib/modules/{FEDORA}/vmlinuz", cpio=True)
        made.archive(f"kernel-modules-core-{FEDORA}", f"lib/modules/{FEDORA}/kernel/drivers/net/veth.ko.xz", cpio=True)
        made.archive(f"kernel-modules-{FEDORA}", *(f"lib/modules/{FEDORA}/{file}.xz" for file in (RXE, SIW)), cpio=True)
        # dnf 4 adds an end to each line that has one already.
        made.write("answers/kernel-core", f"6.16.9-200.fc42.x86_64\n\n{FEDORA}\n\n")


ARCHIVES = [
    ("debian-13", "apt", DEBIAN, ["linux-image-"]),
    ("ubuntu-24.04", "apt", UBUNTU, ["linux-image-", "linux-modules-", "linux-modules-extra-"]),
    ("fedora-42", "dnf", FEDORA, ["kernel-core-", "kernel-modules-core-", "kernel-modules-"]),
]


@pytest.mark.parametrize(("release", "manager", "version", "packages"), ARCHIVES, ids=["debian", "ubuntu", "fedora"])
def test_the_kernel_of_the_archive_is_unpacked_where_the_vm_looks(release, manager, version, packages):
    with machine(release, manager) as made:
        archive_of(made, release)
        done = made.run('provide_kernel; echo "kernel=$kernel"')
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"kernel={version}\n"
        assert done.stderr == f"setup: updating the package lists\nsetup: unpacking kernel {version} for the VM\n"
        (line,) = [line for line in made.log() if " download " in line]
        assert line.split()[3:] == [f"{package}{version}" for package in packages]
        image = made.root / "lib/modules" / version / "vmlinuz"
        assert image.stat().st_mode & 0o444 == 0o444
        assert "vmlinuz" in image.read_text()
        assert made.asked("depmod") == [f"depmod {version}"]
        assert tools.find_kernel(root=made.root, system=made.root) == tools.Kernel(version, image)
        assert not (made.state / "kernel").exists()
        # A second run does nothing.
        made.write("answers/log")
        assert made.run("provide_kernel").stderr == ""
        assert made.log() == ["id -u"]


@pytest.mark.parametrize(("release", "manager", "version", "packages"), ARCHIVES, ids=["debian", "ubuntu", "fedora"])
def test_a_set_up_that_was_cut_off_unpacks_the_kernel_again(release, manager, version, packages):
    with machine(release, manager) as made:
        archive_of(made, release)
        made.write("answers/cut-off")
        assert made.run("provide_kernel").returncode != 0
        (made.answers / "cut-off").unlink()
        done = made.run('provide_kernel; echo "kernel=$kernel"')
        assert (done.returncode, done.stdout) == (0, f"kernel={version}\n"), done.stderr
        assert made.asked("depmod") == [f"depmod {version}"] * 2


@pytest.mark.parametrize(
    ("release", "manager", "version", "end", "image"),
    [
        ("ubuntu-24.04", "apt", UBUNTU, ".zst", f"boot/vmlinuz-{UBUNTU}"),
        ("fedora-42", "dnf", FEDORA, ".xz", f"lib/modules/{FEDORA}/vmlinuz"),
    ],
    ids=["ubuntu", "fedora"],
)
def test_the_kernel_that_is_installed_is_taken(release, manager, version, end, image):
    with machine(release, manager) as made:
        kernel_there(made, version, end, image)
        (made.root / "lib/modules/7.0.0-cloud").mkdir()
        done = made.run('provide_kernel; provide_siw; echo "$kernel"')
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{version}\n", "")
        assert tools.find_kernel(root=made.root, adapters=("rxe", "siw"), system=made.root).version == version


def test_an_image_that_only_root_may_read_is_copied_not_downloaded():
    with machine("ubuntu-24.04", "apt") as made:
        closed = kernel_there(made, UBUNTU, ".zst", f"boot/vmlinuz-{UBUNTU}")
        # sudo opens the file, as it does for root.
        made.write(
            "bin/sudo", f'#!/bin/sh\necho "sudo $*" >>"$answers/log"\nchmod 600 {closed}\n"$@"\nchmod 0 {closed}\n'
        )
        closed.chmod(0)
        done = made.run('provide_kernel; echo "$kernel"')
        image = made.root / "lib/modules" / UBUNTU / "vmlinuz"
        assert (done.returncode, done.stdout) == (0, f"{UBUNTU}\n"), done.stderr
        assert f"copying the image of kernel {UBUNTU}, which only root may read" in done.stderr
        assert made.asked("apt-get") == []
        assert image.read_text() == "image"
        assert image.stat().st_mode & 0o444 == 0o444
        assert closed.stat().st_mode & 0o777 == 0


@pytest.mark.parametrize(
    ("release", "manager", "said"),
    [
        ("debian-13", "apt", "the archive has neither linux-image-amd64 nor linux-image-generic"),
        ("ubuntu-24.04", "apt", "the archive has neither linux-image-amd64 nor linux-image-generic"),
        ("fedora-42", "dnf", "the archive has no kernel-core"),
    ],
)
def test_an_archive_without_a_kernel_is_named(release, manager, said):
    with machine(release, manager) as made:
        done = made.run("provide_kernel")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"setup: {said}"


@pytest.mark.parametrize(
    ("release", "manager", "version", "lacking"),
    [
        ("ubuntu-24.04", "apt", UBUNTU, f"linux-modules-extra-{UBUNTU}"),
        ("fedora-42", "dnf", FEDORA, f"kernel-modules-{FEDORA}"),
    ],
)
def test_a_kernel_whose_package_of_modules_is_not_there_is_refused(release, manager, version, lacking):
    with machine(release, manager) as made:
        archive_of(made, release)
        there = (made.answers / "available").read_text().replace(f"{lacking}\n", "")
        made.write("answers/available", there)
        done = made.run("provide_kernel")
        assert done.returncode == 1
        assert done.stderr.splitlines()[-1] == f"setup: kernel {version} has no rdma_rxe"


def test_a_download_that_fails_is_shown(known):
    made, column = known
    archive_of(made, ("debian-13", "fedora-42")[column])
    if "ubuntu" in (made.root / "etc/os-release").read_text():
        archive_of(made, "ubuntu-24.04")
    shutil.rmtree(made.answers / "archive")
    done = made.run("provide_kernel")
    assert done.returncode == 1
    assert "E: no " in done.stderr
    assert done.stderr.splitlines()[-1] == "setup: the kernel could not be downloaded"


@pytest.mark.parametrize(("release", "manager", "version", "_"), ARCHIVES, ids=["debian", "ubuntu", "fedora"])
def test_a_kernel_without_siw_is_not_fatal_and_is_said_once(release, manager, version, _):
    with machine(release, manager) as made:
        kernel_there(made, version, ".xz", f"lib/modules/{version}/vmlinuz", siw=False)
        done = made.run("provide_kernel; provide_siw; echo went on")
        assert (done.returncode, done.stdout) == (0, "went on\n")
        last = done.stderr.splitlines()[-1]
        assert f"siw could not be built for kernel {version}" in last
        assert last.endswith("there will be no siw0")
        assert made.run("provide_kernel; provide_siw").stderr == ""


def test_without_siw_another_kernel_that_has_it_is_named():
    with machine("fedora-42", "dnf") as made:
        kernel_there(made, FEDORA, ".xz", f"lib/modules/{FEDORA}/vmlinuz", siw=False)
        kernel_there(made, "6.16.9-200.fc42.x86_64", ".xz", "lib/modules/6.16.9-200.fc42.x86_64/vmlinuz")
        done = made.run("provide_kernel; provide_siw")
        assert done.stderr.splitlines()[-1].endswith("siw0 comes with kernel 6.16.9-200.fc42.x86_64")
