"""The shim over soft0: what programs get of a scenario, and that they get nothing else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import building
import pytest
from c_programs import PROGRAMS, run
from kit.compiling import compiled, compiler
from kit.deadlines import patient
from kit.helpers import host_of, sample
from kit.processes import Process, free_port, wait_for_tcp_listener
from kit.programs import built

import ndpy
from ndpy.faults.injection import Injection, load_shim
from ndpy.faults.scenario import Fault, Scenario
from ndpy.platforms.verbs import softverbs

RETRIES, FLUSHED = 12, 5
LINKED = ("libibverbs.so.1", "librdmacm.so.1", "libsoftverbs.so")
WAYS = [
    "write list silent=3 room=2",
    "solicited",
    "srq",
    "write events silent=2",
    "events silent=3",
    "list",
    "events",
    "silent=3",
]

SHIMMED = Path(__file__).with_name("shimmed.py")
CALLS = Path(__file__).parents[2] / "softrdma/shim/calls.h"

pytestmark = pytest.mark.timeout(120)


def completions(faults: list[Fault], options: str = "", count: int = 6, *, fires: bool = True) -> dict[str, list[str]]:
    """What completions.c prints over the shim, by its first words. The order is that of each queue."""
    with Injection(Scenario(faults), "shim") as injection:
        text = run("completions", "soft0", 0, count, *options.split(), **injection.environment({}))
        if fires:
            injection.report().check()
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        found.setdefault(name, []).append(rest)
    return found


@pytest.mark.parametrize("options", sample(WAYS, 3))
def test_a_scenario_without_faults_changes_nothing(options):
    with_shim = completions([], options)
    plain: dict[str, list[str]] = {}
    for line in run("completions", "soft0", 0, 6, *options.split()).splitlines():
        name, _, rest = line.partition(" ")
        plain.setdefault(name, []).append(rest)
    assert with_shim == plain


@pytest.mark.parametrize("options", sample(["events", "list", ""], 1))
def test_the_third_send_fails_and_the_rest_is_flushed(options):
    found = completions([Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")], options)
    assert found["a"] == ["0 0", "1 0", f"2 {RETRIES}", *(f"{i} {FLUSHED}" for i in range(3, 6))]
    assert found["b"] == ["1000 0", "1001 0", *(f"{i} {FLUSHED}" for i in range(1002, 1006))]


def test_silent_requests_before_a_failed_one_stay_silent():
    found = completions([Fault("status", operation="write", nth=5, status="REM_ACCESS_ERR")], "write silent=3")
    assert found["a"] == ["2 0", "4 10", f"5 {FLUSHED}"]


def test_a_call_fails_with_its_errno():
    with Injection(Scenario([Fault("errno", call="reg_mr", nth=1, errno="ENOMEM")]), "shim") as injection:
        with pytest.raises(AssertionError, match="ibv_reg_mr failed: Cannot allocate memory"):
            run("completions", "soft0", 0, 1, **injection.environment({}))
        assert [fired.place for fired in injection.report().fired] == ["reg_mr"]


def test_a_child_without_the_scenario_has_no_faults():
    opens = "import ctypes; print(ctypes.CDLL('librdmacm.so.1').rdma_create_event_channel() != 0)"
    removes = f"import os; os.fork() or (os.environ.pop('NDPY_FAULTS'), exec({opens!r}), os._exit(0)); os.wait()"
    fault = Fault("errno", call="rdma_create_event_channel", errno="ENOMEM")
    with Injection(Scenario([fault]), "shim") as injection:
        environment = injection.environment(softverbs.environment(softverbs.folder(), os.environ))
        told = [
            subprocess.run([sys.executable, "-uc", code], env=environment, capture_output=True, text=True).stdout
            for code in (opens, removes)
        ]
    assert told == ["False\n", "True\n"]


def flushed(name: int, until: int) -> list[str]:
    return [f"{i} {FLUSHED}" for i in range(name, until)]


def succeeded(name: int, until: int) -> list[str]:
    return [f"{i} 0" for i in range(name, until)]


# (fault, options, what a has, what b has)
OF_REQUESTS = {
    "a receive fails": (
        Fault("status", operation="receive", nth=3, status="LOC_PROT_ERR"),
        "list",
        None,  # how many sends have succeeded by then is a race
        ["1000 0", "1001 0", "1002 4", *flushed(1003, 1006)],
    ),
    "held for good": (
        Fault("hold", operation="send", nth=3),
        "events",
        [*succeeded(0, 2), *flushed(2, 6)],
        succeeded(1000, 1006),
    ),
    "held for a time": (
        Fault("hold", operation="send", nth=3, ms=50),
        "events",
        succeeded(0, 6),
        succeeded(1000, 1006),
    ),
    "late, and silent requests behind": (
        Fault("delay", at="request", operation="write", nth=4, ms=50),
        "events write silent=3",
        ["2 0", "5 0"],
        None,
    ),
    "late into a shared receive queue": (
        Fault("delay", at="request", operation="receive", every=2, ms=20),
        "events srq",
        succeeded(0, 6),
        succeeded(1000, 1006),
    ),
    "a late receive": (
        Fault("late_receive", operation="receive", nth=2, ms=50),
        "events",
        succeeded(0, 6),
        succeeded(1000, 1006),
    ),
}


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_requests(name):
    fault, options, of_a, of_b = OF_REQUESTS[name]
    found = completions([fault], options)
    assert of_a is None or found["a"] == of_a
    assert of_b is None or found.get("b") == of_b


def test_a_completion_that_is_silent_wakes_nobody():
    """Whoever waits for it alone does so in vain, and gets it when he looks."""
    found = completions([Fault("silent", operation="write", nth=1)], "events write first=1000", count=1)
    assert found["a"] == ["0 0"]
    assert found["events"] == ["0"]


def test_a_list_of_requests_is_one_call():
    found = completions([Fault("errno", call="post_send", nth=1, errno="ENOMEM")], "list")
    assert found["post"] == ["0: Cannot allocate memory"]
    assert "a" not in found
    assert found["b"] == flushed(1000, 1006)


def test_a_queue_pair_that_fails_as_a_whole_flushes_everything():
    found = completions([Fault("queue_pair_fatal", nth=7)], "list")
    assert found["a"] == flushed(0, 6)
    assert found["b"] == flushed(1000, 1006)


def test_a_completion_queue_that_has_failed_has_no_completions():
    found = completions([Fault("completion_queue_error", nth=7)], "list first=500")
    assert "a" not in found
    assert found["b"] == flushed(1000, 1006)


@pytest.mark.parametrize(
    ("situation", "fault", "saw"),
    [
        ("connects", Fault("refuse", nth=1), "ConnectionRefusedError \nworks\n"),
        ("connects", Fault("reject", nth=1, data=b"\1\2\3"), "ConnectionRefusedError 010203\nworks\n"),
        ("connects", Fault("time_out", nth=1), "TimeoutError\nworks\n"),
        ("loses", Fault("disconnect", nth=1, bytes=250), "sent 2\nboth ends know\n"),
        ("loses", Fault("disconnect", nth=2), "sent 0\nboth ends know\n"),
        ("wrong_byte", Fault("corrupt", nth=1), "wrong 1\nsource True\n"),
        ("is_removed", Fault("remove", nth=9), "DeviceRemovedError\n"),
    ],
    ids=str,
)
def test_what_ndpy_sees_of_it(situation, fault, saw):
    """ndpy finds its functions with dlsym()."""
    with Injection(Scenario([fault]), "shim") as injection:
        done = subprocess.run(
            [sys.executable, SHIMMED, situation],
            env=injection.environment(),
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert (done.returncode, done.stdout) == (0, saw), done.stderr
        injection.report().check()


def test_what_programs_should_not_do_and_do():
    """Threads that post and poll while others fork and close things that are in use; libraries that are found late."""
    with Injection(Scenario([Fault("slow", call="alloc_pd", nth=1, ms=1)]), "shim") as injection:
        assert run("hostile", "soft0", **injection.environment({})).endswith("done\n")
        injection.report().check()


def sanitizer(name: str) -> str:
    """The file of gcc's sanitizer. The test skips without it."""
    command = [compiler(), f"-print-file-name=lib{name}.so"]
    path = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"needs gcc with lib{name}")
    return path


def test_a_program_under_thread_sanitizer():
    """ThreadSanitizer looks for functions with dlsym(), which is the shim's, before it can be called itself."""
    sanitizer("tsan")
    fault = Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")
    options = {"TSAN_OPTIONS": "ignore_noninstrumented_modules=1"}
    with Injection(Scenario([fault]), "shim") as injection:
        found = run(
            "completions", "soft0", 0, 6, "list", options=("-fsanitize=thread",), **injection.environment(options)
        )
        injection.report().check()
    assert re.findall(r"^a (\d+) (\d+)$", found, re.MULTILINE)[:3] == [("0", "0"), ("1", "0"), ("2", str(RETRIES))]
    assert "ThreadSanitizer" not in found


def test_a_program_with_the_c_library_musl():
    """Its dynamic loader has other names than glibc's."""
    if shutil.which("musl-gcc") is None:
        pytest.skip("needs musl-gcc")
    machine = subprocess.run(["gcc", "-dumpmachine"], capture_output=True, text=True).stdout.strip()
    headers = ["/usr/include", f"/usr/include/{machine}"]
    build = building.BUILD / "musl"
    building.make("softrdma/verbs", "CC=musl-gcc", f"BUILD={build}", f"VERBS_HEADERS={' '.join(headers)}", "WERROR=")
    program = build / "completions"
    libraries = [build / "lib" / name for name in LINKED]
    includes = [f"-idirafter{folder}" for folder in headers]
    command = ["musl-gcc", *includes, PROGRAMS / "completions.c", *libraries, f"-Wl,-rpath,{build}/lib", "-o", program]
    subprocess.run(command, check=True)
    with Injection(Scenario([Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")]), "shim") as injection:
        environment = injection.environment({}) | {"LD_PRELOAD": f"{build}/lib/libndpyfaults.so"}
        found = subprocess.run(
            [program, "soft0", "0", "6", "list"], env=environment, capture_output=True, text=True, timeout=60
        )
        injection.report().check()
    assert found.returncode == 0, found.stderr
    assert re.findall(r"^a (\d+) (\d+)$", found.stdout, re.MULTILINE)[:3] == [
        ("0", "0"),
        ("1", "0"),
        ("2", f"{RETRIES}"),
    ]


SANITIZED = [
    ([], "events silent=3"),
    ([Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")], "events"),
    ([Fault("hold", operation="send", nth=3)], "list"),
    ([Fault("corrupt", nth=2)], "srq"),
    ([Fault("remove", nth=9)], ""),
]


def sanitized(faults: list[Fault], name: str, *words: str) -> str:
    """What a program prints with a sanitizer in the shim and in softverbs, which find nothing."""
    sanitizers = [sanitizer("asan"), sanitizer("ubsan")]
    building.make("softrdma/verbs", *building.LIBRARY["-asan"])
    libraries = building.BUILD / "lib-asan"
    program = built(PROGRAMS / f"{name}.c", "-rdynamic", "-lrdmacm")
    with Injection(Scenario(faults), "shim") as injection:
        environment = {
            **os.environ,
            **building.SANITIZERS,
            **injection.environment({}),
            "LD_LIBRARY_PATH": str(libraries),
            "LD_PRELOAD": ":".join([*sanitizers, str(libraries / "libndpyfaults.so")]),
        }
        done = subprocess.run([program, *words], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Sanitizer" not in done.stderr, done.stderr
    assert "runtime error" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize(("faults", "options"), [(None, ""), *sample(SANITIZED, 1)])
def test_sanitizers_find_nothing(faults, options):
    """The program hostile is the first one."""
    if faults is None:
        sanitized([], "hostile", "soft0", "without-forks")
    else:
        sanitized(faults, "completions", "soft0", "0", "6", *options.split())


def test_identifiers_are_destroyed_while_the_others_are_told_of_a_removal():
    with ndpy.open_adapter("soft0") as adapter:
        address = host_of(adapter)
    removal = Fault("remove", after_ms=int(patient(3) * 1000))
    assert "destroyed 300" in sanitized([removal], "removed_ids", address, "300")


def foreign(name: str, injection: Injection | None, *words: str) -> Process:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed: make setup")
    variables = softverbs.environment(softverbs.folder(), os.environ)
    return Process(path, *words, variables={**variables, **(injection.environment({}) if injection else {})})


def test_a_program_that_nobody_here_wrote_fails_as_the_scenario_says():
    """ibv_rc_pingpong waits for events. Its peer has no shim."""
    port = str(free_port())
    words = ("-d", "soft0", "-g", "0", "-p", port, "-n", "20", "-e")
    scenario = Scenario([Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR")])
    with Injection(scenario, "shim") as injection, foreign("ibv_rc_pingpong", None, *words) as server:
        wait_for_tcp_listener(server, int(port))
        with foreign("ibv_rc_pingpong", injection, *words, "127.0.0.1") as client:
            ended = client.finish()
        assert ended.status == 1
        assert "(12) for wr_id 2" in ended.err
        (fired,) = injection.report().fired
        assert (fired.place, fired.count) == ("send", 3)
        assert fired.caller.startswith("ibv_rc_pingpong")


def test_libraries_that_only_an_extension_of_python_has_opened():
    """Debian's pyverbs is linked with libibverbs, and Python opens it for itself alone."""
    code = (
        "from pyverbs.device import Context; from pyverbs.pd import PD; from pyverbs.mr import MR\n"
        "pd = PD(Context(name='soft0')); MR(pd, 4096, 1).close(); MR(pd, 4096, 1)"
    )
    if subprocess.run(["/usr/bin/python3", "-c", "import pyverbs.device"], capture_output=True).returncode != 0:
        pytest.skip("needs Debian's python3-pyverbs")
    scenario = Scenario([Fault("errno", call="reg_mr", nth=2, errno="ENOMEM")])
    with (
        Injection(scenario, "shim") as injection,
        foreign("/usr/bin/python3", injection, "-c", code) as program,
    ):
        ended = program.finish()
        assert ended.status == 1
        assert "Errno: 12" in ended.err
        injection.report().check()


def versions_of(library: Path) -> set[tuple[str, str]]:
    """The functions that a library exports, each with the version for which programs ask."""
    text = subprocess.run(
        ["readelf", "--dyn-syms", "--wide", library], capture_output=True, text=True, check=True
    ).stdout
    return set(re.findall(r" (?:ibv|rdma)_(\w+)@@((?:IBVERBS|RDMACM)_[\d.]+)", text))


def test_the_shim_exports_what_programs_ask_for():
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    ours = versions_of(softverbs.folder() / "libndpyfaults.so")
    names = re.findall(r"X\([^,]+, +(?:ibv|rdma)_(\w+)", CALLS.read_text("utf-8").replace("\\\n", ""))
    assert sorted(name for name, _ in ours) == sorted(names)
    assert ours <= versions_of(softverbs.folder() / softverbs.LIBRARY)


def test_forks_while_requests_fail():
    """The shim moves a queue pair to the error state, for which softverbs takes the lock that it also takes at a
    fork.
    """
    program = f"""if True:
        import ctypes, sys, threading
        forking = ctypes.CDLL({str(built(PROGRAMS / "slow_fork.c", "-shared", "-fPIC"))!r})
        assert forking.begin() == 0
        import ndpy
        from ndpy.testing import connected_pair

        goes_on = True

        def fails():
            with ndpy.open_adapter("soft0") as adapter:
                while goes_on:
                    with connected_pair(adapter) as (client, server):
                        server.queue_pair.receive(server.memory)
                        client.queue_pair.send(client.memory[:5])
                        assert not client.take()[0].ok

        threads = [threading.Thread(target=fails, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(60):
            # The other threads run meanwhile.
            assert forking.fork_once() == 0
        goes_on = False
        for thread in threads:
            thread.join()
        """
    fails = Fault("status", operation="send", every=1, status="RETRY_EXC_ERR")
    with Injection(Scenario([fails]), "shim") as injection:
        done = python(program, injection.environment())
        assert (done.returncode, done.stderr) == (0, "")
        injection.report().check()


@pytest.mark.parametrize("do", ["duplicate", "reorder"])
def test_only_datagrams_come_twice_or_in_another_order(do):
    plain = completions([])
    found = completions([Fault(do, every=1)], fires=False)
    assert (found["a"], found["b"]) == (plain["a"], plain["b"])


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Numbers are posted to the adapter, and those in brackets are completions for the program.
        ("", "1 2 3 4 [1] [2] [3] [4]"),
        ("twice", "1 1 2 2 [1] [2] 3 3 4 4 [3] [4]"),
        ("late", "3 1 2 [1] [2] [3] 4 [4]"),
        ("twice destroyed", "1 1 2 2 [1] [2]"),
        ("late destroyed", "3 1 2 [3] [1] [2]"),
        # By ibv_wr_send().
        ("single", "1 2 3 4 [1] [2] [3] [4]"),
        ("twice single", "1 1 2 2 [1] [2] 3 3 4 4 [3] [4]"),
        ("late single", "3 1 2 [1] [2] [3] 4 [4]"),
        ("twice single destroyed", "1 1 2 2 [1] [2]"),
        ("together", "1 2 3 4 [1] [2] [3] [4]"),
        ("twice together", "1 2 3 4 1 2 3 4 [1] [2] [3] [4]"),
        ("late together", "3 1 2 [1] [2] [3] 4 [4]"),
        ("late together destroyed", "3 1 2 [3] [1] [2]"),
    ],
)
def test_datagrams_at_a_full_queue(tmp_path, words, expected):
    """The program is never told that its queue is full because of datagrams that it has not posted."""
    flags = ["-g", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    folders = [f"-I{CALLS.parent}", f"-I{CALLS.parents[1] / 'faults'}"]
    program = compiled(tmp_path / "full_queue", *flags, *folders, PROGRAMS / "full_queue.c", timeout_s=100)
    done = subprocess.run(
        [program, *words.split()],
        env={**os.environ, **building.SANITIZERS},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


# ---- in a process that begins and ends scenarios itself ----


def python(code: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=patient(60)
    )


def test_each_scenario_of_a_process_begins_anew(tmp_path):
    """Queue pairs count from 1 and faults at a time fire again, also beside an adapter that has outlived its
    scenario.
    """
    wrong = tmp_path / "wrong"
    wrong.write_text("scenario 1\nfault at=message do=split nth=1\n")
    done = python(
        f"""if True:
        import contextlib
        import ndpy
        from ndpy.faults.injection import Injection, load_shim
        from ndpy.faults.scenario import Fault, Scenario
        from ndpy.platforms.verbs import native_calls
        from ndpy.testing import connected_pair

        def sends(adapter):
            with connected_pair(adapter) as (client, server):
                server.queue_pair.receive(server.memory)
                client.queue_pair.send(client.memory[:5])
                return client.take()[0].ok

        faults = [
            Fault("status", operation="send", queue_pair=1, nth=1, status="RETRY_EXC_ERR"),
            Fault("port_down", after_ms=1),
        ]
        load_shim()
        load_shim()
        with contextlib.ExitStack() as outliving:
            before = outliving.enter_context(ndpy.open_adapter("soft0"))
            for _ in range(2):
                with Injection(Scenario(faults), "shim") as injection:
                    injection.begin()
                    adapter = outliving.enter_context(ndpy.open_adapter("soft0"))
                    print(sends(adapter), sends(before))
                    injection.report().check()
                print(sends(adapter), sends(before))
            try:
                native_calls.begin_faults({str(wrong)!r})
            except ValueError as error:
                print(error)
            print(sends(adapter))
        """
    )
    each = ["False True", "True True"]
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:4] + lines[5:] == [*each, *each, "True"]
    assert re.search(r"line 2: the shim cannot do=split", lines[4])


def test_a_process_that_has_the_shim_already_opens_no_second_one():
    with Injection(Scenario([]), "shim") as injection:
        done = python("from ndpy.faults.injection import load_shim; load_shim()", injection.environment())
    assert done.returncode == 1
    assert "ProviderNotFoundError" in done.stderr
    assert "by LD_PRELOAD" in done.stderr


def test_without_a_shim_a_process_says_so(monkeypatch):
    monkeypatch.setattr("ndpy.faults.injection.SHIM", "nothing.so")
    with pytest.raises(ndpy.ProviderNotFoundError, match="this installation has no shim"):
        load_shim()
