"""ndpy softroce without a VM: arguments, missing tools, the choice of a kernel, limits, the kernel log."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from kit import linux_only as linux_only

from ndpy.platforms.verbs import distribution
from ndpy.tools.cli import main
from ndpy.tools.machines import SetupError, kernel_log, links, tools, vm
from ndpy.tools.machines import run as runner

DEBIAN = distribution.Distribution("debian", "debian", "/etc/os-release")


def invoke(*arguments):
    return CliRunner().invoke(main, ["softroce", *arguments])


def kmsg(*texts):
    return "".join(f"4,{100 + i},{5000000 + i},-;{text}\n" for i, text in enumerate(texts)).encode()


def collected(*texts):
    collector = kernel_log.Collector()
    collector.feed(kmsg(*texts))
    return collector.records


@pytest.fixture
def no_adapter_here(monkeypatch):
    monkeypatch.setattr(links, "adapters", lambda kind=None: [])
    monkeypatch.setattr(links, "module_available", lambda name="rdma_rxe": False)


@pytest.fixture
def adapter_here(monkeypatch):
    monkeypatch.setattr(links, "adapters", lambda kind=None: ["rxe0"])


# Arguments


def test_command_is_required():
    assert invoke("run").exit_code == 2


@pytest.mark.parametrize("words", [["up"], ["down"], ["run", "--", "true"]], ids=lambda words: words[0])
def test_another_system_is_told_that_this_is_for_linux(monkeypatch, words):
    """Windows has neither geteuid() nor SIGHUP."""
    monkeypatch.setattr("platform.system", lambda: "Windows")
    monkeypatch.delattr("os.geteuid")
    monkeypatch.delattr("signal.SIGHUP")
    result = CliRunner().invoke(main, ["softroce", *words])
    assert "on Linux only" in result.output
    assert "ndpy softnd" in result.output
    assert result.exit_code == (125 if words[0] == "run" else 1)
    assert isinstance(result.exception, SystemExit)


def test_options_after_the_command_belong_to_the_command(monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "run", lambda request, say: seen.append(request) or 0)
    assert invoke("run", "--limit", "9", "--", "tool", "--limit", "7", "-x", "--", "y").exit_code == 0
    assert invoke("run", "tool", "--cpus", "7").exit_code == 0
    assert seen[0].command == ("tool", "--limit", "7", "-x", "--", "y")
    assert seen[0].limit_s == 9
    assert seen[1].command == ("tool", "--cpus", "7")


def test_a_kernel_or_the_instruction_clock_asks_for_the_vm(monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "run", lambda request, say: seen.append(request) or 0)
    for option in (["--vm"], ["--icount"], ["--kernel", "6.1.0"], ["--network"], ["--forward", "1:2"], []):
        invoke("run", *option, "--", "true")
    assert [request.force_vm for request in seen] == [True, True, True, True, True, False]


def test_forwards_come_with_the_user_network(monkeypatch):
    seen = []
    monkeypatch.setattr(runner, "run", lambda request, say: seen.append(request.machine.forwards) or 0)
    for options in ([], ["--network"], ["--forward", "1234:7174", "--forward", "65535:1"]):
        invoke("run", *options, "--", "true")
    assert seen == [None, (), (vm.Forward(1234, 7174), vm.Forward(65535, 1))]


@pytest.mark.parametrize("forward", ["7174", "0:1", "1:65536", "1:2:3", "a:1", "-1:2", ":"])
def test_forward_that_is_no_pair_of_ports_is_refused(forward):
    assert invoke("run", "--forward", forward, "--", "true").exit_code == 2


def test_unknown_adapter_kind_is_refused():
    assert invoke("run", "--adapter", "mlx5", "--", "true").exit_code == 2


# Missing tools


def test_all_missing_tools_are_named_at_once_with_their_packages(monkeypatch, no_adapter_here):
    monkeypatch.setattr(tools, "find", lambda tool: None)
    monkeypatch.setattr(distribution, "read", lambda root=Path("/"): DEBIAN)
    result = invoke("run", "--", "true")
    assert result.exit_code == runner.EXIT_SETUP
    for tool in tools.FOR_VM:
        assert tool in result.output
    for package in ("qemu-system-x86", "busybox-static", "kmod", "iproute2", "zstd", "virtme-ng"):
        assert package in result.output


def test_every_tool_has_a_package():
    assert set(tools.FOR_VM) <= set(tools.THINGS)


# The choice of a kernel


def kernel_tree(root, version, *, rxe=True, siw="", image="vmlinuz"):
    """Make the files of a kernel. siw: the folder of siw's module, or "" for none."""
    folder = root / "lib/modules" / version
    (folder / "kernel/drivers/infiniband/sw/rxe").mkdir(parents=True)
    if rxe:
        (folder / "kernel/drivers/infiniband/sw/rxe/rdma_rxe.ko.zst").touch()
    if siw:
        (folder / siw).mkdir(parents=True, exist_ok=True)
        (folder / siw / "siw.ko").touch()
    if image == "boot":
        (root / "boot").mkdir(exist_ok=True)
        (root / "boot" / f"vmlinuz-{version}").touch()
    elif image:
        (folder / image).touch()


def test_newest_kernel_with_rxe_is_chosen(tmp_path):
    kernel_tree(tmp_path, "6.1.0-9-amd64")
    kernel_tree(tmp_path, "6.1.0-56-amd64", image="boot")
    kernel_tree(tmp_path, "6.12.0-1-cloud-amd64", rxe=False)
    found = tools.find_kernel(root=tmp_path)
    assert found == tools.Kernel("6.1.0-56-amd64", tmp_path / "boot/vmlinuz-6.1.0-56-amd64")
    assert tools.find_kernel("6.1.0-9-amd64", tmp_path).version == "6.1.0-9-amd64"


@pytest.mark.parametrize("folder", ["updates", "updates/dkms", "kernel/drivers/infiniband/sw/siw"])
def test_newest_kernel_with_siw_is_chosen_when_siw_is_asked_for(tmp_path, folder):
    kernel_tree(tmp_path, "6.1.0-9-amd64", siw=folder)
    kernel_tree(tmp_path, "6.1.0-56-amd64", siw=folder)
    kernel_tree(tmp_path, "6.12.107+deb13-amd64")
    kernel_tree(tmp_path, "7.2.13+deb14-amd64", siw=folder, image="")
    assert tools.find_kernel(root=tmp_path, adapters=("siw",)).version == "6.1.0-56-amd64"
    assert tools.find_kernel(root=tmp_path, adapters=("rxe",)).version == "6.12.107+deb13-amd64"


def test_a_kernel_without_rxe_serves_siw(tmp_path):
    kernel_tree(tmp_path, "6.12.0-cloud", rxe=False, siw="updates")
    assert tools.find_kernel(root=tmp_path, adapters=("siw",)).version == "6.12.0-cloud"


def test_siw_comes_along_with_rxe_where_the_newest_kernel_has_it(tmp_path):
    kernel_tree(tmp_path, "6.1.0-56-amd64", siw="updates")
    kernel_tree(tmp_path, "6.12.107+deb13-amd64")
    assert tools.find_kernel(root=tmp_path, adapters=("rxe", "siw")).version == "6.12.107+deb13-amd64"


def test_the_kernels_are_listed_with_what_each_lacks_for_siw(tmp_path):
    kernel_tree(tmp_path, "6.1.0", siw="updates", image="")
    kernel_tree(tmp_path, "6.12.107+deb13-amd64")
    with pytest.raises(SetupError) as caught:
        tools.find_kernel(root=tmp_path, adapters=("siw",))
    assert "no kernel with siw" in str(caught.value)
    assert "6.12.107+deb13-amd64: no module siw" in str(caught.value)
    assert "6.1.0: no readable image" in str(caught.value)
    with pytest.raises(SetupError, match=r"kernel 6\.12\.107\+deb13-amd64 with siw was not found"):
        tools.find_kernel("6.12.107+deb13-amd64", tmp_path, adapters=("siw",))


def test_the_virtual_machine_boots_the_kernel_that_has_what_is_asked_for(monkeypatch):
    seen = []

    def find_kernel(version=None, root=Path("/"), adapters=("rxe",)):
        seen.append((version, adapters))
        raise SetupError("no kernel here")

    monkeypatch.setattr(tools, "missing", lambda wanted: [])
    monkeypatch.setattr(tools, "find_kernel", find_kernel)
    for arguments in (["--adapter", "siw"], ["--adapter", "rxe"], ["--kernel", "6.1.0"]):
        assert invoke("run", "--vm", *arguments, "--", "true").exit_code == runner.EXIT_SETUP
    assert seen == [(None, ("siw",)), (None, ("rxe",)), ("6.1.0", ("rxe", "siw"))]


def test_the_virtual_machine_boots_a_kernel_of_the_folder_that_was_asked_for(monkeypatch, tmp_path):
    kernel_tree(tmp_path, "7.2.13", rxe=False)
    monkeypatch.setattr(tools, "missing", lambda wanted: [])
    result = invoke("run", "--kernel-root", str(tmp_path), "--adapter", "rxe", "--", "true")
    assert result.exit_code == runner.EXIT_SETUP
    assert f"no kernel with rdma_rxe was found in {tmp_path / 'lib/modules'}" in result.output
    assert "7.2.13: no module rdma_rxe" in result.output
    assert invoke("run", "--kernel-root", str(tmp_path / "absent"), "--", "true").exit_code == 2


def test_unusable_kernels_are_listed_with_what_they_lack(tmp_path):
    kernel_tree(tmp_path, "6.12.0-cloud", rxe=False)
    kernel_tree(tmp_path, "6.1.0", image="")
    with pytest.raises(SetupError) as caught:
        tools.find_kernel(root=tmp_path)
    assert "6.12.0-cloud: no module rdma_rxe" in str(caught.value)
    assert "6.1.0: no readable image" in str(caught.value)
    assert "make setup" in str(caught.value)


# Links on this machine


def test_up_and_down_need_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for action in ("up", "down"):
        result = invoke(action)
        assert result.exit_code == 1
        assert "root" in result.output


def test_tool_that_hangs_is_given_up_after_its_limit(monkeypatch):
    monkeypatch.setattr(tools, "find", lambda tool: "/bin/sleep")
    start = time.monotonic()
    with pytest.raises(SetupError, match=r"did not finish within 0\.2 s"):
        links._call(["rdma", "60"], "cannot delete", 0.2)
    assert time.monotonic() - start < 30


# Running here


def test_command_runs_here_if_there_is_an_adapter(adapter_here, capfd):
    said = []
    status = runner.run(runner.Request(("sh", "-c", "echo it ran; exit 37")), said.append)
    assert status == 37
    assert capfd.readouterr().out == "it ran\n"
    assert said[0] == "running here, on rxe0"


def test_command_gets_no_standard_input(adapter_here, capfd):
    assert runner.run(runner.Request(("cat",), limit_s=10), lambda text: None) == 0


def test_command_that_overruns_its_limit_is_ended(adapter_here):
    said = []
    start = time.monotonic()
    status = runner.run(runner.Request(("sleep", "60"), limit_s=0.3), said.append)
    assert status == runner.EXIT_LIMIT
    assert time.monotonic() - start < 30
    assert any("did not finish within 0.3 s" in text for text in said)


def test_command_that_a_signal_ends_is_reported(adapter_here):
    said = []
    status = runner.run(runner.Request(("sh", "-c", "kill -9 $$")), said.append)
    assert status == 128 + signal.SIGKILL
    assert any("SIGKILL" in text for text in said)


def test_command_that_does_not_exist_is_127(adapter_here):
    assert runner.run(runner.Request(("no-such-command",)), lambda text: None) == 127


def test_kernel_trouble_fails_a_command_that_passed(adapter_here, monkeypatch):
    records = collected("BUG: kernel NULL pointer dereference, address: 0")
    monkeypatch.setattr(kernel_log.RunningKernel, "read", lambda self: records)
    said = []
    assert runner.run(runner.Request(("true",)), said.append) == runner.EXIT_KERNEL
    assert any("NULL pointer" in text for text in said)
    assert runner.run(runner.Request(("sh", "-c", "exit 5")), said.append) == 5


def test_vm_that_breaks_after_the_command_passed_is_a_failure(no_adapter_here, monkeypatch):
    outcome = vm.Outcome(0, "the VM hung after the command", broken=True, console="the last line")
    monkeypatch.setattr(vm, "run", lambda *arguments: outcome)
    said = []
    assert runner.run(runner.Request(("true",)), said.append) == runner.EXIT_SETUP
    assert any("the last line" in text for text in said)


def test_a_kernel_log_that_cannot_be_kept_is_refused_before_the_command_runs(adapter_here, tmp_path):
    result = invoke("run", "--keep-log", str(tmp_path / "absent/log"), "--", "touch", str(tmp_path / "ran"))
    assert result.exit_code == 2
    assert f"there is no folder {tmp_path / 'absent'}" in result.output
    assert not (tmp_path / "ran").exists()


def test_kernel_log_is_kept_in_a_file(adapter_here, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_log.RunningKernel, "read", lambda self: collected("rdma_rxe: loaded"))
    file = tmp_path / "log"
    runner.run(runner.Request(("true",), keep_log=file), lambda text: None)
    assert file.read_text() == "[    5.000000] rdma_rxe: loaded\n"


# The VM's streams and settings


def passed_on(mark, *chunks):
    seen = []
    stream = vm._Stream(mark, seen.append)
    for chunk in chunks:
        stream.feed(chunk)
    return b"".join(seen), stream


def test_end_mark_is_found_wherever_the_chunks_are_cut():
    mark, text = b"ndpy-00n0", b"n nd ndpy- ndpy-00 ndpy-00n the end"
    whole = text + mark
    for cut in range(len(whole)):
        seen, stream = passed_on(mark, whole[:cut], whole[cut:])
        assert (seen, stream.ended) == (text, True)
    seen, stream = passed_on(mark, *(whole[i : i + 1] for i in range(len(whole))))
    assert (seen, stream.ended) == (text, True)


def test_output_is_passed_on_at_once_up_to_a_possible_mark():
    seen, stream = passed_on(b"ndpy-42", b"line 1\nline 2\nnd")
    assert seen == b"line 1\nline 2\n"
    assert not stream.ended


def test_held_back_bytes_are_output_if_the_vm_goes_away():
    seen = []
    stream = vm._Stream(b"ndpy-42", seen.append)
    stream.feed(b"and")
    stream.give_up()
    assert b"".join(seen) == b"and"


def test_job_keeps_environment_folder_and_arguments(tmp_path):
    environment = {"PLAIN": "1", "ODD": "a 'quoted' $word\nand a line", "BASH_FUNC_f%%": "() { :; }"}
    script = vm._job_script(["printf", "%s|", "$HOME", "two words", ""], tmp_path, environment)
    script = script.replace("exec ", 'pwd; printf "%s|" "$PLAIN" "$ODD"; exec ')
    done = subprocess.run(["sh"], input=script, capture_output=True, text=True, timeout=10, check=True)
    folder, rest = done.stdout.split("\n", 1)
    assert folder == str(tmp_path)
    assert rest == "1|a 'quoted' $word\nand a line|$HOME|two words||"


def test_checkout_around_the_working_folder_is_writable(tmp_path):
    (tmp_path / "checkout/.git").mkdir(parents=True)
    inner = tmp_path / "checkout/a/b"
    inner.mkdir(parents=True)
    assert vm.writable_folder(inner) == tmp_path / "checkout"
    assert vm.writable_folder(tmp_path) == tmp_path


# The kernel log


@pytest.mark.parametrize(
    "text",
    [
        "BUG: kernel NULL pointer dereference, address: 0000000000000010",
        "BUG: KASAN: slab-use-after-free in rxe_completer+0x1/0x2",
        "BUG: scheduling while atomic: swapper/0/0/0x00000002",
        "kernel BUG at drivers/infiniband/core/verbs.c:100!",
        "WARNING: CPU: 1 PID: 266 at drivers/infiniband/sw/rxe/rxe_pool.c:230 __rxe_cleanup+0x12c/0x170",
        "WARNING: possible circular locking dependency detected",
        "Oops: 0000 [#1] PREEMPT SMP NOPTI",
        "general protection fault, probably for non-canonical address 0xdead000000000100: 0000 [#1]",
        "watchdog: BUG: soft lockup - CPU#0 stuck for 26s! [python:300]",
        "NMI watchdog: Watchdog detected hard LOCKUP on cpu 0",
        "rcu: INFO: rcu_preempt self-detected stall on CPU",
        "rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:",
        "INFO: task rdma:312 blocked for more than 120 seconds.",
        "refcount_t: underflow; use-after-free.",
        "unregister_netdevice: waiting for veth0 to become free. Usage count = 2",
        "list_del corruption. prev->next should be ffff888, but was ffff999",
        "BUG: Bad page state in process python  pfn:12345",
        "Kernel panic - not syncing: sysrq triggered crash",
    ],
)
def test_trouble_is_found(text):
    assert [record.text for record in kernel_log.find_bugs(collected("before", text))] == [text]


def test_healthy_messages_are_no_trouble():
    healthy = collected(
        "rdma_rxe: loaded",
        "infiniband rxe0: set active",
        "IPv6: ADDRCONF(NETDEV_CHANGE): veth0: link becomes ready",
        "siw: loading out-of-tree module taints kernel.",
        "siw: module verification failed: signature and/or required key missing - tainting kernel",
        "rdma_rxe: rxe_requester: moved to error state",
        "python[300]: segfault at 0 ip 00007f error 4 in libc.so.6",
        "debugfs: directory 'DEBUG' is present",
    )
    assert kernel_log.find_bugs(healthy) == []


OOPS_OF_7_2 = """\
[    2.661105] Oops: int3: 0000 [#1] SMP NOPTI
[    2.661619] CPU: 1 UID: 0 PID: 0 Comm: swapper/1 Not tainted 7.2.13+deb14-amd64 #1 PREEMPT(lazy)
[    2.666167] RIP: 0010:sched_clock_cpu+0x9/0x230
[    2.758907] RIP: 0010:pv_native_safe_halt+0xf/0x20
[    2.759993] Kernel panic - not syncing: Fatal exception in interrupt
"""


@pytest.mark.parametrize(
    ("console", "line"),
    [
        (OOPS_OF_7_2, "Oops: int3: 0000 [#1] SMP NOPTI at sched_clock_cpu+0x9/0x230"),
        (
            "[    1.2] invalid opcode: 0000 [#1] PREEMPT SMP NOPTI\r\n[    1.3] RIP: 0010:f+0x1/0x2\r\n",
            "invalid opcode: 0000 [#1] PREEMPT SMP NOPTI at f+0x1/0x2",
        ),
        (
            "[    1.234567][    T1] Kernel panic - not syncing: No working init found.\n"
            "[    1.3] Call Trace:\n[    1.4] RIP: 0010:f+0x1/0x2\n",
            "Kernel panic - not syncing: No working init found.",
        ),
        ("[    1.2] BUG: kernel NULL pointer dereference, address: 0\n[    1.3] Oops: 0002 [#1]", "Oops: 0002 [#1]"),
    ],
)
def test_the_line_in_which_a_kernel_died_is_found_with_its_place(console, line):
    assert kernel_log.fatal_line("SeaBIOS\n[    0.000000] Linux version 7.2\n" + console) == line


def test_a_kernel_that_only_warns_lives():
    warning = """\
[    0.000000] Command line: console=ttyS0 panic=-1 oops=panic
[    1.0] WARNING: CPU: 1 PID: 2 at x.c:3 f+0x1/0x2
[    1.1] RIP: 0010:f+0x1/0x2
[    1.2] ---[ end trace 0000000000000000 ]---
[    1.3] pci 0000:00:01.0: [1af4:1000] type 00 class 0x020000 conventional PCI endpoint
"""
    assert kernel_log.fatal_line(warning) == ""


def test_trace_is_shown_with_its_first_line():
    texts = ["WARNING: CPU: 1 PID: 2 at x.c:3", "Call Trace:", " f+0x1/0x2", "---[ end trace 0 ]---", "after"]
    assert [record.text for record in kernel_log.find_bugs(collected("before", *texts))] == texts[:-1]


def test_records_arrive_in_pieces_and_twice_and_count_once():
    data = kmsg("one; with a semicolon", "two") + b" SUBSYSTEM=x\n"
    collector = kernel_log.Collector()
    for i in range(0, len(data), 7):
        collector.feed(data[i : i + 7])
    collector.feed(data)
    assert [record.text for record in collector.records] == ["one; with a semicolon", "two"]
    assert collector.position("two") == 1
    assert collector.position("three") is None


def test_importing_the_command_line_imports_no_subcommand():
    code = "import sys, ndpy.tools.cli; print(sorted(m for m in sys.modules if m.startswith('ndpy.tools.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout.strip() == "['ndpy.tools.cli', 'ndpy.tools.standard_output']"
