"""What `ndpy doctor` finds of kernel, device files, limits and containers, on faked machines."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest
from faked_machine import ADAPTER, FILES, KERNEL, named, on, one, says, verdicts
from kit import linux_only as linux_only

from ndpy.platforms.verbs import device_files
from ndpy.tools.doctor import linux, linux_system
from ndpy.tools.doctor.findings import Finding
from ndpy.tools.doctor.linux_system import examine_control_groups, examine_device_files
from ndpy.vocabulary import system_files

STATUS = "Name:\tpython\nVmLck:\t       0 kB\nVmPin:\t      64 kB\nCapEff:\t{capabilities:016x}\n"
WHOLE_MACHINE = "         0          0 4294967295\n"
IPC_LOCK = 1 << 14
CONTAINER = {".dockerenv": ""}

# Drivers and modules, in faked trees.


def test_drivers_are_listed(tree):
    root = tree({"etc/libibverbs.d/mlx5.driver": "driver mlx5\n", "usr/lib64/libibverbs/libmlx5-rdmav34.so": ""})
    assert "mlx5" in one(on(root, linux.examine_drivers)).message


def test_a_driver_without_its_library_is_warned(tree):
    root = tree({"etc/libibverbs.d/mlx5.driver": "driver mlx5\n", "etc/libibverbs.d/own.driver": "driver /opt/own\n"})
    found = says(one(on(root, linux.examine_drivers)), "WARN", "mlx5")
    assert "/opt/own" not in found.message


def test_no_driver_at_all_names_the_package(tree):
    found = one(on(tree({"etc/os-release": "ID=debian\n"}), linux.examine_drivers))
    says(found, "WARN", remedy="apt-get install libibverbs1 ibverbs-providers")


@pytest.mark.parametrize(
    ("files", "state"),
    [
        ({"sys/module/ib_uverbs/refcnt": "0"}, "loaded"),
        ({"sys/class/infiniband_verbs/abi_version": "6"}, "loaded"),
        ({f"lib/modules/{KERNEL}/modules.builtin": "kernel/drivers/infiniband/core/ib_uverbs.ko\n"}, "loaded"),
        ({f"lib/modules/{KERNEL}/modules.dep": "kernel/drivers/infiniband/core/ib_uverbs.ko.xz: x.ko\n"}, "available"),
        ({f"lib/modules/{KERNEL}/modules.dep": "kernel/other.ko: kernel/core/ib_uverbs.ko.xz\n"}, "absent"),
        ({}, "absent"),
    ],
)
def test_the_state_of_a_module(tree, files, state):
    with system_files.below(tree(files)):
        assert linux_system.module_state("ib_uverbs") == state


def test_a_module_that_is_there_only_needs_loading(tree):
    root = tree({f"lib/modules/{KERNEL}/modules.dep": "core/ib_uverbs.ko:\ncore/rdma_ucm.ko:\n"})
    found = named(on(root, linux_system.examine_modules), "module ib_uverbs")
    assert says(found, "FAIL").remedy == "as root: modprobe ib_uverbs"


def test_a_module_that_is_absent_needs_a_package(tree):
    found = named(on(tree({"etc/os-release": "ID=ubuntu\n"}), linux_system.examine_modules), "module rdma_ucm")
    says(found, "FAIL", remedy=f"linux-modules-extra-{KERNEL}")


def test_in_a_container_modules_are_the_hosts(tree):
    found = named(on(tree(CONTAINER), linux_system.examine_modules), "module rdma_ucm")
    assert found.remedy.startswith("on the host, as root: modprobe rdma_ucm")


# Device files.


def test_device_files_that_can_be_opened_pass(tree):
    findings = on(tree({**ADAPTER, **FILES}), examine_device_files)
    assert [finding.check for finding in findings] == ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]
    assert verdicts(findings) == {"PASS"}


def test_a_device_file_that_may_not_be_opened_fails(tree):
    if os.geteuid():
        pytest.skip("only root can become another user")
    # Other users cannot enter pytest's folders.
    with tempfile.TemporaryDirectory() as folder:
        root = tree({**ADAPTER, **FILES}, Path(folder))
        for path in [root, *root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o666)
        (root / "dev/infiniband/uverbs0").chmod(0o600)
        os.seteuid(65534)
        try:
            findings = on(root, examine_device_files)
        finally:
            os.seteuid(0)
    says(named(findings, "/dev/infiniband/uverbs0"), "FAIL", "65534", "udev")
    says(named(findings, "/dev/infiniband/rdma_cm"), "PASS")


def test_without_device_files_a_machine_with_an_adapter_needs_modules(tree):
    files = {"sys/class/infiniband/mlx5_0/node_type": "1: CA"}
    says(one(on(tree(files), examine_device_files)), "FAIL", "mlx5_0", "modprobe -a ib_uverbs rdma_ucm")


def test_without_device_files_although_the_modules_are_loaded_dev_needs_them(tree):
    found = says(one(on(tree({**ADAPTER, "sys/module/rdma_ucm/refcnt": "0"}), examine_device_files)), "FAIL")
    assert "modprobe" not in found.remedy and "PrivateDevices=no" in found.remedy


HOST_OF_EIGHT = {f"sys/class/infiniband/mlx5_{i}/node_type": "1: CA" for i in range(8)} | {
    f"sys/class/infiniband_verbs/uverbs{i}/ibdev": f"mlx5_{i}" for i in range(8)
}
POD = {
    **HOST_OF_EIGHT,
    "proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1\0",
    "dev/infiniband/uverbs3": "",
    "dev/infiniband/rdma_cm": "",
}


def refuse(monkeypatch, numbers: dict[str, int]) -> None:
    """Let opening the device files of these names fail, as for a user or in a control group without the right."""
    opens = system_files.refusal

    def refusal(place: Path) -> OSError | None:
        number = numbers.get(place.name)
        return opens(place) if number is None else OSError(number, os.strerror(number))

    monkeypatch.setattr(system_files, "refusal", refusal)


def test_what_a_pod_was_given_passes_and_what_belongs_to_others_is_a_remark(tree):
    findings = on(tree(POD), examine_device_files)
    assert [finding.check for finding in findings] == [
        "/dev/infiniband/uverbs3",
        "other adapters",
        "/dev/infiniband/rdma_cm",
    ]
    assert verdicts(findings) == {"PASS"}
    assert "mlx5_0, mlx5_1, mlx5_2, mlx5_4, mlx5_5, mlx5_6, mlx5_7" in named(findings, "other adapters").message


def test_files_that_a_control_group_forbids_belong_to_others(tree, monkeypatch):
    refuse(monkeypatch, {f"uverbs{i}": errno.EPERM for i in range(8) if i != 3})
    files = {f"dev/infiniband/uverbs{i}": "" for i in range(8)}
    findings = on(tree({**POD, **files}), examine_device_files)
    assert verdicts(findings) == {"PASS"}
    assert "mlx5_7" in named(findings, "other adapters").message


def test_without_a_file_that_opens_those_that_a_control_group_forbids_are_failures(tree, monkeypatch):
    refuse(monkeypatch, {f"uverbs{i}": errno.EPERM for i in range(8)})
    files = {f"dev/infiniband/uverbs{i}": "" for i in range(8)}
    findings = on(tree({**HOST_OF_EIGHT, **FILES, **files}), examine_device_files)
    says(named(findings, "/dev/infiniband/uverbs7"), "FAIL")
    assert "DeviceAllow=" in named(findings, "/dev/infiniband/uverbs7").remedy


def test_files_that_this_user_may_not_open_are_a_warning_beside_one_that_it_may(tree, monkeypatch):
    refuse(monkeypatch, {f"uverbs{i}": errno.EACCES for i in range(8) if i != 3})
    files = {f"dev/infiniband/uverbs{i}": "" for i in range(8)}
    findings = on(tree({**POD, **files}), examine_device_files)
    says(named(findings, "/dev/infiniband/uverbs0"), "WARN")
    says(named(findings, "/dev/infiniband/uverbs3"), "PASS")


@pytest.mark.parametrize("which", ["mlx5_5", "mlx5_5:1"])
def test_an_adapter_of_others_that_is_named_fails_alone(tree, which):
    findings = on(tree(POD), lambda: examine_device_files(which))
    assert [finding.check for finding in findings] == ["/dev/infiniband/uverbs5", "/dev/infiniband/rdma_cm"]
    found = says(named(findings, "/dev/infiniband/uverbs5"), "FAIL")
    assert "resources" in found.remedy and "modprobe" not in found.remedy


def test_a_broken_device_file_fails_beside_one_that_opens(tree, monkeypatch):
    refuse(monkeypatch, {"uverbs5": errno.EIO})
    findings = on(tree({**POD, "dev/infiniband/uverbs5": ""}), examine_device_files)
    says(named(findings, "/dev/infiniband/uverbs5"), "FAIL")
    assert "dmesg" in named(findings, "/dev/infiniband/uverbs5").remedy


def test_a_container_is_told_to_take_its_own_device_only(tree):
    findings = on(tree({**ADAPTER, **CONTAINER}), examine_device_files)
    wanted = "docker run --device=/dev/infiniband/uverbs0 --device=/dev/infiniband/rdma_cm"
    assert says(one(findings), "FAIL").remedy == wanted
    several = on(tree({**HOST_OF_EIGHT, **CONTAINER}), examine_device_files)
    assert "--device=/dev/infiniband/uverbsN " in one(several).remedy
    assert "uverbs7 is mlx5_7" in one(several).remedy


def test_a_container_without_rdma_cm_is_told_to_take_it(tree):
    findings = on(tree({**ADAPTER, ".dockerenv": "", "dev/infiniband/uverbs0": ""}), examine_device_files)
    assert named(findings, "/dev/infiniband/rdma_cm").remedy == "docker run --device=/dev/infiniband/rdma_cm"


def test_why_an_adapter_that_is_asked_for_is_not_listed(tree):
    with system_files.below(tree(POD)):
        assert "mlx5_5" not in device_files.why_unlisted("mlx5_3")
        said = device_files.why_unlisted("mlx5_5")
        assert "/dev/infiniband/uverbs5" in said and "resources" in said
        assert device_files.why_unlisted("mlx5_9") == ""


def test_only_rdma_cm_is_no_adapter(tree):
    findings = on(tree({"dev/infiniband/rdma_cm": ""}), examine_device_files)
    says(named(findings, "device files"), "FAIL")
    says(named(findings, "/dev/infiniband/rdma_cm"), "PASS")


def test_a_missing_rdma_cm_names_its_module(tree):
    findings = on(tree({**ADAPTER, "dev/infiniband/uverbs0": ""}), examine_device_files)
    says(named(findings, "/dev/infiniband/rdma_cm"), "FAIL", remedy="modprobe rdma_ucm")


# Locked memory.


def memlock(tree, soft: object, hard: object, capabilities: int = 0, uid_map: str = WHOLE_MACHINE) -> Finding:
    limits = (
        f"Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {soft}  "
        f"{hard}  bytes\n"
    )
    root = tree(
        {
            "proc/self/limits": limits,
            "proc/self/status": STATUS.format(capabilities=capabilities),
            "proc/self/uid_map": uid_map,
        }
    )
    return one(on(root, linux_system.examine_memlock))


@pytest.mark.parametrize(
    ("soft", "verdict"), [("unlimited", "PASS"), (1 << 32, "PASS"), (8 << 20, "WARN"), (65536, "FAIL"), (0, "FAIL")]
)
def test_the_verdict_on_the_limit_of_locked_memory(tree, soft, verdict):
    assert memlock(tree, soft, "unlimited").verdict.value == verdict


def test_too_little_lockable_memory_says_how_much_is_pinned_and_the_remedy(tree):
    found = memlock(tree, 65536, 8 << 20)
    assert "RLIMIT_MEMLOCK is 64 KiB" in found.message
    assert "64 KiB are pinned" in found.message
    assert "8192 KiB" in found.remedy
    for words in ("ulimit -l", "limits.conf", "LimitMEMLOCK=", "--ulimit memlock=-1"):
        assert words in found.remedy


def test_a_process_with_the_capability_is_exempt(tree):
    says(memlock(tree, 65536, 65536, IPC_LOCK), "PASS")


def test_the_capability_of_a_user_namespace_is_no_exemption(tree):
    says(memlock(tree, 65536, 65536, IPC_LOCK, "0 1000 1\n"), "FAIL")


# Open files.


def nofile(tree, soft: object, hard: object, taken: int = 4) -> Finding:
    limits = {"proc/self/limits": f"Max open files            {soft}                 {hard}               files\n"}
    descriptors = {f"proc/self/fd/{number}": "" for number in range(taken)}
    return one(on(tree({**limits, **descriptors}), linux_system.examine_nofile))


@pytest.mark.parametrize(
    ("soft", "taken", "verdict"),
    [
        ("unlimited", 4, "PASS"),
        (1024, 4, "PASS"),
        (256, 4, "WARN"),
        (64, 4, "WARN"),
        (16, 4, "FAIL"),
        (1024, 1020, "FAIL"),
    ],
)
def test_the_verdict_on_the_limit_of_open_files(tree, soft, taken, verdict):
    assert nofile(tree, soft, "unlimited", taken).verdict.value == verdict


def test_too_few_open_files_say_how_many_are_taken_and_the_remedy(tree):
    found = nofile(tree, 64, 4096)
    assert "RLIMIT_NOFILE is 64, of which 4 are taken" in found.message
    assert "may go to 4096" in found.remedy
    for words in ("ulimit -n", "limits.conf", "LimitNOFILE=", "--ulimit nofile="):
        assert words in found.remedy


@pytest.mark.parametrize("examination", [linux_system.examine_memlock, linux_system.examine_nofile])
def test_without_proc_there_is_a_finding_all_the_same(tree, examination):
    says(one(on(tree({}), examination)), "WARN")


def test_the_limit_of_open_files_is_told_of_this_process():
    assert "RLIMIT_NOFILE" in one(linux_system.examine_nofile()).message


# Control groups.


def test_without_limits_all_control_groups_pass(tree):
    files = {"proc/self/cgroup": "0::/user.slice\n"}
    files |= {f"sys/fs/cgroup/user.slice/{name}": "max\n" for name in ("rdma.max", "pids.max", "memory.max")}
    findings = on(tree(files), examine_control_groups)
    assert len(findings) == 3
    assert verdicts(findings) == {"PASS"}


def test_a_limit_of_a_group_above_counts(tree):
    root = tree(
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/pids.max": "max\n",
            "sys/fs/cgroup/a/pids.max": "100\n",
            "sys/fs/cgroup/a/pids.current": "95\n",
        }
    )
    found = named(on(root, examine_control_groups), "pids control group")
    says(found, "WARN", "95 of at most 100", "/sys/fs/cgroup/a/pids.max")


def test_version_1_has_a_tree_for_each_controller(tree):
    root = tree(
        {
            "proc/self/cgroup": "8:pids:/\n5:memory:/jobs/7\n3:cpu,cpuacct:/x\n0::/\n",
            "sys/fs/cgroup/memory/jobs/7/memory.limit_in_bytes": str(256 << 20),
            "sys/fs/cgroup/memory/jobs/7/memory.usage_in_bytes": str(200 << 20),
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(0x7FFFFFFFFFFFF000),
            "sys/fs/cgroup/pids/pids.max": "100000",
            "sys/fs/cgroup/pids/pids.current": "7",
        }
    )
    findings = on(root, examine_control_groups)
    says(named(findings, "memory control group"), "WARN", "200 MiB of at most 256 MiB")
    assert named(findings, "pids control group").message == "7 of at most 100000 of threads in use"


def test_a_path_of_the_hosts_in_a_container_leads_to_what_is_there(tree):
    root = tree(
        {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/pids.max": "10", "sys/fs/cgroup/pids.current": "1"}
    )
    assert "1 of at most 10" in named(on(root, examine_control_groups), "pids control group").message


@pytest.mark.parametrize(
    ("current", "verdict"), [("hca_handle=1 hca_object=5", "WARN"), ("hca_handle=2 hca_object=5", "FAIL")]
)
def test_limits_of_rdma_objects_are_told(tree, current, verdict):
    root = tree(
        {
            "proc/self/cgroup": "0::/job\n",
            "sys/fs/cgroup/job/rdma.max": "mlx5_0 hca_handle=2 hca_object=max\n",
            "sys/fs/cgroup/job/rdma.current": f"mlx5_0 {current}\n",
        }
    )
    found = named(on(root, examine_control_groups), "rdma control group")
    says(found, verdict, ("mlx5_0", "of at most 2 open adapters"), "/sys/fs/cgroup/job/rdma.max")


def test_limits_of_the_adapters_of_others_are_nothing(tree):
    limits = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/rdma.max": "mlx5_0 hca_handle=0 hca_object=0\nmlx5_3 hca_handle=4 hca_object=max\n",
    }
    findings = [one for one in on(tree({**POD, **limits}), examine_control_groups) if one.check == "rdma control group"]
    assert [finding.message for finding in findings] == ["mlx5_3: 0 of at most 4 open adapters are in use"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "raise /sys/fs/cgroup/pids.max"),
        (CONTAINER, "docker run --pids-limit="),
        ({"proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1"}, "podPidsLimit"),
    ],
)
def test_a_limit_is_raised_where_it_was_set(tree, files, words):
    limits = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/pids.max": "10\n", "sys/fs/cgroup/pids.current": "9\n"}
    found = named(on(tree({**files, **limits}), examine_control_groups), "pids control group")
    assert found.remedy.startswith(("raise", "docker run")) and words in found.remedy


# Huge pages and containers.


@pytest.mark.parametrize(("total", "free", "verdict"), [(0, 0, "PASS"), (16, 3, "PASS"), (16, 0, "WARN")])
def test_huge_pages(tree, total, free, verdict):
    text = f"MemTotal: 1 kB\nHugePages_Total: {total}\nHugePages_Free: {free}\nHugepagesize: 2048 kB\n"
    says(one(on(tree({"proc/meminfo": text}), linux_system.examine_huge_pages)), verdict)


@pytest.mark.parametrize(
    "files",
    [
        CONTAINER,
        {"run/.containerenv": ""},
        {"proc/1/environ": "PATH=/bin\0container=lxc\0"},
        {"proc/self/cgroup": "0::/system.slice/docker/2\n"},
    ],
)
def test_a_container_is_told_what_it_lacks(tree, files):
    limits = {"proc/self/limits": "Max locked memory         65536 65536 bytes\n"}
    found = one(on(tree(files | limits), linux_system.examine_container))
    says(found, "WARN", remedy=("--device=/dev/infiniband", "--ulimit memlock=-1"))


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/kubepods/pod1/2\n"},
        {"proc/1/environ": "PATH=/bin\0KUBERNETES_SERVICE_HOST=10.0.0.1\0"},
        {"proc/self/environ": "KUBERNETES_SERVICE_HOST=10.0.0.1\0"},
        {"var/run/secrets/kubernetes.io/serviceaccount/token": ""},
    ],
)
def test_a_pod_is_told_what_it_lacks(tree, files):
    limits = {"proc/self/limits": "Max locked memory         65536 65536 bytes\n"}
    found = says(
        one(on(tree(files | limits), linux_system.examine_container)),
        "WARN",
        remedy=("resources", "LimitMEMLOCK=infinity"),
    )
    assert "docker" not in found.remedy


def test_a_container_that_was_given_everything_passes(tree):
    files = {".dockerenv": "", "proc/self/limits": "Max locked memory  unlimited unlimited bytes\n", **FILES}
    says(one(on(tree(files), linux_system.examine_container)), "PASS")


def test_an_empty_tree_breaks_nothing(tree):
    findings = on(tree({}), linux_system.examine_system)
    assert not [finding for finding in findings if "could not be examined" in finding.message]


def test_nonsense_in_every_file_breaks_nothing(tree):
    names = (
        "proc/self/limits", "proc/self/status", "proc/self/cgroup", "proc/self/uid_map", "proc/meminfo",
        "proc/1/environ",
        "sys/fs/cgroup/pids.max", "sys/fs/cgroup/rdma.max", "etc/libibverbs.d/x.driver",
    )  # fmt: skip
    root = tree(dict.fromkeys(names, "\x00:=: \n::\nmax =\n"))
    checks = {finding.check for finding in on(root, linux_system.examine_system)}
    assert {"locked memory", "open files", "huge pages", "container"} <= checks


@pytest.mark.parametrize(
    ("own", "above", "tightest"),
    [((10, 4), (20, 18), "a/"), ((10, 8), (20, 12), "a/b/"), ((10, 4), (10, 4), "a/b/"), ((30, 0), (20, 1), "a/")],
)
def test_of_the_limits_on_the_way_up_the_one_with_least_room_is_named(tree, own, above, tightest):
    """Each pair is (limit, in use): for the process's own control group, and for the one above it."""
    files = {"proc/self/cgroup": "0::/a/b\n"}
    for folder, (limit, used) in (("a/b", own), ("a", above)):
        files |= {
            f"sys/fs/cgroup/{folder}/pids.max": f"{limit}\n",
            f"sys/fs/cgroup/{folder}/pids.current": f"{used}\n",
            f"sys/fs/cgroup/{folder}/rdma.max": f"mlx5_0 hca_handle={limit}\n",
            f"sys/fs/cgroup/{folder}/rdma.current": f"mlx5_0 hca_handle={used}\n",
        }
    findings = on(tree(files), examine_control_groups)
    limit, used = own if tightest == "a/b/" else above
    rdma = named(findings, "rdma control group")
    assert f"{used} of at most {limit} " in rdma.message
    assert f"/sys/fs/cgroup/{tightest}rdma.max" in rdma.remedy
    assert f"{used} of at most {limit} " in named(findings, "pids control group").message
