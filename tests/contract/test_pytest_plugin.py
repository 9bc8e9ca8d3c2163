"""The plugin of pytest that ndpy brings, in sessions of its own, with the adapter under test."""

from __future__ import annotations

import os
import platform
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.deadlines import patient
from kit.helpers import STRESS, require

import ndpy
import pytest_ndpy
from ndpy.testing import own_address
from ndpy.vocabulary.quirks import Quirk

# Under Wine a session takes five to twenty seconds.
slow_on_windows = pytest.mark.skipif(
    sys.platform == "win32" and not STRESS, reason="with NDPY_STRESS=1 only: it starts processes"
)
ROOT = Path(__file__).resolve().parents[2]

PEERS = """
    import os
    import time

    import pytest

    def serve(adapter, channel, ending):
        print("serving")
        with (
            adapter.listen((adapter.info.addresses[0], 0)) as listener,
            adapter.register(bytearray(5)) as memory,
            adapter.create_completion_queue(4) as queue,
            adapter.create_queue_pair(queue) as queue_pair,
        ):
            channel.send(listener.address)
            queue_pair.receive(memory)
            with listener.get_request(20) as request:
                request.accept(queue_pair, timeout_s=20)
                queue.wait(20)[0].raise_for_status()
            return bytes(memory.buffer) + ending

    def fail(adapter, channel):
        raise LookupError("nothing here")

    def die(adapter, channel):
        os._exit(3)

    def hang(adapter, channel):
        print("hanging", flush=True)
        channel.send("begun")
        time.sleep(600)
"""


@pytest.fixture
def session(pytester, adapter_name, request, monkeypatch):
    """session(source, *arguments) runs pytest on a module, on the adapter under test, in a process of its own."""
    where = ["--rdma", "here", "--rdma-adapter", adapter_name]
    # Other plugins that are installed take time to load. tests/wheels has the sessions with them.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    # With these, pytest's summary repeats the whole report of each failure.
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    # The checkout may not be installed.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    provider = os.environ.get("NDPY_PROVIDER")
    if provider:
        # `pytester` has left the working folder, from which it may be named.
        monkeypatch.setenv("NDPY_PROVIDER", str(ROOT / provider))

    def run(source: str, *arguments: str, where: list[str] = where, limit_s: float = 90) -> pytest.RunResult:
        pytester.makepyfile(source)
        words = ["-p", "pytest_ndpy", *where, "-p", "no:cacheprovider", *arguments]
        return pytester.runpytest_subprocess(*words, timeout=patient(limit_s))

    return run


def test_the_example_of_the_documentation(adapter, session):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    page = (ROOT / "docs/start/tests.md").read_text("utf-8")
    session(page.partition("```python\n")[2].partition("```")[0]).assert_outcomes(passed=1)


def test_the_fixtures_work_and_leave_nothing(session):
    result = session("""
        import asyncio, subprocess, sys

        from ndpy import aio

        def test_messages_both_ways(rdma_pair):
            for source, sink in (rdma_pair, reversed(list(rdma_pair))):
                sink.queue_pair.receive(sink.memory)
                source.queue_pair.send(source.memory[:100])
                source.take_ok()
                assert sink.take_ok()[0].nbytes == 100

        def test_a_cache_hits(rdma_cache):
            buffer = bytearray(8192)
            for _ in range(2):
                rdma_cache.local(buffer).release()

        def test_a_server_echoes(rdma_server, rdma_adapter):
            async def echo(connection):
                await connection.send(await connection.receive())

            async def main():
                async with rdma_server(echo) as server, aio.connect(server.address, adapter=rdma_adapter) as connection:
                    await connection.send(b"hello")
                    assert await connection.receive() == b"hello"

            asyncio.run(main())

        def test_a_program_finds_the_adapter(rdma_env, rdma_adapter_name):
            code = "import ndpy; print([info.name for info in ndpy.list_adapters()])"
            done = subprocess.run([sys.executable, "-c", code], env=rdma_env, stdout=subprocess.PIPE, check=True)
            assert rdma_adapter_name.encode() in done.stdout

        def test_one_adapter(rdma_adapter, rdma_adapter_name):
            assert rdma_adapter.info.name == rdma_adapter_name
        """)
    result.assert_outcomes(passed=5)


@slow_on_windows
def test_the_checks_of_smoke_are_tests(session):
    result = session("", "--pyargs", "ndpy.smoke", "-k", "load or notification or refusals", "-rA")
    assert result.ret == 0, result.stdout.str()
    result.stdout.fnmatch_lines(["PASSED *::test_check[[]load/library]", "*passed*"])


def test_what_is_left_open_fails_its_test_and_no_other(session, pytester):
    # Nothing ends by itself here.
    pytester.makeconftest("""
        from ndpy.testing import leaks

        class Log:
            records = []

            def read(self):
                return self.records

        leaks._GRACE_S = 0.1
        leaks._kernel_log = Log
        """)
    result = session("""
        import asyncio, os, threading, time

        from ndpy.tools.machines.kernel_log import Record

        kept = []

        def test_object(rdma_adapter):
            kept.append(rdma_adapter.create_completion_queue(4))  # here

        def test_registered_bytes(rdma_cache):
            kept.append(rdma_cache.local(bytearray(4096)))  # leased here

        def test_descriptor(rdma_adapter):
            kept.append(open(__file__))

        def test_thread(rdma_adapter):
            threading.Thread(target=time.sleep, args=(60,), name="idler", daemon=True).start()

        def test_task(rdma_adapter):
            loop = asyncio.new_event_loop()
            kept.append(loop.create_task(asyncio.sleep(60), name="forgotten"))
            loop.close()

        def test_kernel_log(rdma_adapter):
            from conftest import Log

            Log.records += [Record(1, 2.5, "usual"), Record(2, 3.5, "BUG: unable to handle")]

        def test_nothing(rdma_adapter):
            with rdma_adapter.create_completion_queue(4):
                pass

        def test_that_uses_no_adapter():
            kept.append(open(__file__))
        """)
    files = sys.platform == "linux"
    result.assert_outcomes(passed=8, errors=5 + 2 * files)
    result.stdout.fnmatch_lines(
        [
            "*left open: <CompletionQueue*, made at *.py:8: *# here*",
            "*left open: <MemoryRegion of 4096 bytes*, made at *.py:11: *# leased here",
            "*left open: thread idler",
            "*left open: <Task pending name='forgotten' *",
            "the kernel's log: *3.5* BUG: unable to handle",
        ]
    )
    assert "<Adapter" not in result.stdout.str()
    if files:
        result.stdout.fnmatch_lines(["*left open: descriptor *.py"])


def test_each_object_that_a_test_leaves_open_is_told_with_its_place(session, pytester, adapter):
    pytester.makeconftest("from ndpy.testing import leaks\n\nleaks._GRACE_S = 0.1")
    lines = {
        "region": ["rdma_adapter.register(bytearray(4096))"],
        "begun": ["rdma_adapter.begin_register(bytearray(1 << 20)).result(20)"],
        "queue_then_region": ["rdma_adapter.create_completion_queue(4)", "rdma_adapter.register(bytearray(4096))"],
        "queue_pair": ["rdma_adapter.create_completion_queue(4)", "rdma_adapter.create_queue_pair(kept[-1])"],
        "listener": ["rdma_adapter.listen((rdma_adapter.info.addresses[0], 0))"],
        "connector": ["rdma_adapter.create_connector()"],
        "adapter": ["ndpy.open_adapter(rdma_adapter.info.name)"],
        "region_of_a_cache": ["rdma_cache.local(bytearray(4096))"],
    }
    if ndpy.Capability.PROTECTION_DOMAINS in adapter.info.capabilities:
        lines["domain"] = ["rdma_adapter.create_protection_domain()", "kept[-1].register(bytearray(4096))"]
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        lines["window"] = ["rdma_adapter.create_memory_window()"]
    source = "import ndpy\n\nkept = []\n"
    for name, made in lines.items():
        source += f"\ndef test_{name}(rdma_adapter, rdma_cache):\n"
        source += "".join(f"    kept.append({each})  # {name} {place}\n" for place, each in enumerate(made))
    result = session(source)
    result.assert_outcomes(passed=len(lines), errors=len(lines))
    told = re.findall(r"^left open: .*", result.stdout.str(), re.MULTILINE)
    places = [re.sub(r".*, made at .*test_each_object\S*\.py:\d+: .*# ", "", line) for line in told]
    assert sorted(places) == sorted(f"{name} {place}" for name, made in lines.items() for place in range(len(made)))


@slow_on_windows
def test_what_a_test_drops_fails_it_if_warnings_are_errors(session):
    source = """
        def test_region(rdma_adapter):
            rdma_adapter.register(bytearray(4096))  # dropped
    """
    session(source).assert_outcomes(passed=1)
    result = session(source, "-W", "error::ResourceWarning")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["exception that * <MemoryRegion of 4096 bytes*, made at *.py:2: *# dropped:"])


@slow_on_windows
def test_an_exception_that_nobody_can_catch_fails_its_test(session):
    result = session("""
        import warnings

        class Careless:
            def __del__(self):
                raise ValueError("in a finalizer")

        def test_finalizer(rdma_adapter):
            cycle = Careless()
            cycle.itself = cycle

        def test_unclosed(rdma_adapter):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                rdma_adapter.create_completion_queue(4)  # here

        def test_nothing(rdma_adapter):
            pass
        """)
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines(["exception that nobody could catch, in *Careless*", "*ValueError: in a finalizer"])
    result.stdout.fnmatch_lines(
        ["exception that * <CompletionQueue of depth 4*>, made at *.py:14: *# here*", "*ResourceWarning: unclosed *"]
    )


@slow_on_windows
def test_a_known_quirk_is_a_strict_expected_failure(session, adapter):
    known = [quirk for quirk in Quirk if quirk in adapter._quirks and quirk.value.is_in(platform.release())]
    harmless = [quirk for quirk in known if not quirk.value.crashes_machine]
    of_others = next(quirk for quirk in Quirk if quirk not in adapter._quirks)
    tests = """
        @pytest.mark.rdma(quirk=Quirk.{name})
        def test_{name}_fails():
            raise AssertionError

        @pytest.mark.rdma(quirk=Quirk.{name})
        def test_{name}_passes():
            pass
    """
    chosen = [of_others, *harmless[:1]]
    source = "".join(textwrap.dedent(tests.format(name=quirk.name)) for quirk in chosen)
    result = session("import pytest\nfrom ndpy.vocabulary.quirks import Quirk\n" + source, "-rxf")
    result.assert_outcomes(passed=1, failed=len(chosen), xfailed=len(harmless[:1]))
    for quirk in harmless[:1]:
        assert f"[XPASS(strict)] {quirk.value.summary}" in result.stdout.str()


def test_a_peer_is_another_process_whose_failure_is_the_tests(session):
    result = session(
        PEERS
        + """
    def test_a_message_to_a_peer(rdma_adapter, rdma_peer):
        peer = rdma_peer(serve, b"!")
        address = peer.get()
        with (
            rdma_adapter.create_completion_queue(4) as queue,
            rdma_adapter.create_queue_pair(queue) as queue_pair,
            rdma_adapter.create_connector() as connector,
            rdma_adapter.register(bytearray(b"hello")) as memory,
        ):
            connector.connect(queue_pair, address, timeout_s=20)
            connector.complete_connect(timeout_s=20)
            queue_pair.send(memory)
            queue.wait(20)[0].raise_for_status()
            assert peer.result() == b"hello!"

    def test_a_peer_that_fails(rdma_peer):
        rdma_peer(fail)

    def test_a_peer_that_dies(rdma_peer):
        rdma_peer(die)

    def test_a_peer_that_is_killed(rdma_peer):
        peer = rdma_peer(hang)
        assert peer.get() == "begun"
        peer.kill()
        """,
        "-rA",
    )
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(["*fail() in process * has failed: *", "*LookupError: nothing here"])
    result.stdout.fnmatch_lines(["*die() in process * has failed: the process has ended with status 3*"])


def test_a_peer_that_starts_slowly_is_waited_for(session, pytester):
    limit_s = patient(0.5)
    pytester.makeconftest(f"from ndpy.testing import peers\n\npeers._GRACE_S = {limit_s}")
    result = session(f"""
        import sys, time

        # The process of the function imports this too.
        if "peer_process" in sys.argv[0]:
            time.sleep({2 * limit_s})

        def say(adapter, test):
            test.send("said")

        def test_at_its_end(rdma_peer):
            rdma_peer(say)

        def test_value(rdma_peer):
            assert rdma_peer(say).get({limit_s}) == "said"

        def test_result(rdma_peer):
            rdma_peer(say).result({limit_s})
        """)
    result.assert_outcomes(passed=3)


@slow_on_windows
def test_a_peer_that_hangs_is_named_and_killed(session, pytester):
    pytester.makeconftest("from ndpy.testing import peers\n\npeers._GRACE_S = 1.0")
    result = session(PEERS + "\n    def test_hanging(rdma_peer):\n        assert rdma_peer(hang).get() == 'begun'\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*hang() in process * still runs * after the test, and was killed", "hanging"])
    if sys.platform != "win32":
        result.stdout.fnmatch_lines(["*line * in hang"])


@slow_on_windows
def test_what_the_adapter_lacks_is_skipped_by_its_name(session, adapter):
    missing = [one for one in ndpy.Capability if one not in adapter.info.capabilities]
    claimed = [one for one in ndpy.Capability if one in adapter.info.capabilities]
    result = session(
        f"""
        import ndpy, pytest

        @pytest.mark.rdma(capabilities=ndpy.Capability.{missing[0].name})
        def test_missing(rdma_adapter):
            raise AssertionError

        @pytest.mark.rdma(capabilities=ndpy.Capability.{claimed[0].name}, min_depth=4)
        def test_there(rdma_adapter):
            pass

        @pytest.mark.rdma(min_depth=1 << 40)
        def test_depth():
            raise AssertionError
        """,
        "-rs",
    )
    result.assert_outcomes(passed=1, skipped=2)
    name = adapter.info.name
    result.stdout.fnmatch_lines([f"*{name} does not claim {missing[0].name}", f"*the queues of {name} have * places*"])


def test_an_adapter_without_an_address_says_so():
    nowhere = SimpleNamespace(info=SimpleNamespace(name="mlx5_0", addresses=()))
    with pytest.raises(ndpy.UnsupportedError, match="mlx5_0 has no IP address"):
        own_address(nowhere)


@slow_on_windows
def test_an_adapter_that_is_absent_fails_and_none_skips(session):
    source = """
        import pytest

        def test_fixture(rdma_adapter):
            pass

        @pytest.mark.rdma
        def test_marker():
            pass

        def test_plain():
            pass
    """
    absent = session(source, where=["--rdma", "here", "--rdma-adapter", "nothere7"])
    absent.assert_outcomes(passed=1, errors=2)
    absent.stdout.fnmatch_lines(["*the adapter of --rdma here is not usable: *nothere7*"])
    session(source, "-rs", where=["--rdma", "none"]).assert_outcomes(passed=1, skipped=2)


@slow_on_windows
def test_a_session_without_rdma_imports_nothing_and_checks_nothing(session):
    session(
        """
        import sys, threading, time

        kept = []

        def test_nothing():
            assert "ndpy" not in sys.modules
            assert "multiprocessing" not in sys.modules

        def test_that_leaves_things():
            kept.append(open(__file__))
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        """,
        where=[],
    ).assert_outcomes(passed=2)


@slow_on_windows
def test_each_fixture_has_a_page_that_states_its_scope(session):
    text = session("", "--fixtures", where=[]).stdout.str()
    pages = re.findall(r"^(rdma_\w+)( \[session scope\])? -- .*\n((?: {4}.*\n)+)", text, re.MULTILINE)
    assert {name for name, _, _ in pages} == set(pytest_ndpy._FIXTURES)
    for name, of_session, page in pages:
        assert ("One for the session." if of_session else "or one test") in re.sub(r"\s+", " ", page), name


@pytest.mark.skipif(sys.platform != "linux", reason="the usual adapter of Windows is softnd, which needs its wheel")
def test_the_usual_adapter_is_soft0(session, monkeypatch):
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    session("def test_name(rdma_adapter):\n    assert rdma_adapter.info.name == 'soft0'", where=[]).assert_outcomes(
        passed=1
    )


@slow_on_windows
@pytest.mark.parametrize(
    "arguments", [("--rdma-adapter", "x"), ("--rdma", "soft", "--rdma-driver", "rxe"), ("--rdma", "somewhere")]
)
def test_options_that_do_not_go_together_are_refused(session, arguments):
    assert session("", where=[*arguments]).ret == pytest.ExitCode.USAGE_ERROR


FAULTY = """
    import contextlib, multiprocessing, subprocess, sys, time

    import pytest

    import ndpy
    from ndpy.faults import Fault, ScenarioError
    from ndpy.testing import connected_pair, session

    FIRST_SEND = Fault("status", operation="send", nth=1, status="RETRY_EXC_ERR")
    NEVER = Fault("errno", call="reg_mr", nth=1000, errno="ENOMEM")
    # On siw, opening an adapter makes completion queues too, but no channels for them.
    CALL = "create_cq" if sys.platform == "win32" else "create_comp_channel"
    NO_QUEUE = Fault("errno", call=CALL, errno="ENOMEM")

    def send(adapter):
        with connected_pair(adapter) as (client, server):
            server.queue_pair.receive(server.memory)
            client.queue_pair.send(client.memory[:5])
            client.take_ok()

    def test_a_fault_fires(rdma_faults):
        adapter = rdma_faults(FIRST_SEND)
        with pytest.raises(ndpy.NdpyError):
            send(adapter)
        assert [each.place for each in rdma_faults.report().fired] == ["send"]

    def test_the_next_test_has_none(rdma_adapter):
        send(rdma_adapter)

    def test_the_second_write_fails(rdma_faults):
        adapter = rdma_faults(Fault("status", operation="write", nth=2, status="REM_ACCESS_ERR"))
        with connected_pair(adapter) as (client, server):
            client.queue_pair.write(client.memory, server.memory.remote())
            client.take_ok()
            client.queue_pair.write(client.memory, server.memory.remote())
            with pytest.raises(ndpy.AccessViolationError):
                client.take_ok()

    def test_a_completion_is_late(rdma_faults):
        adapter = rdma_faults(Fault("delay", at="request", operation="send", nth=1, ms=300))
        begin = time.monotonic()
        send(adapter)
        assert time.monotonic() - begin > 0.3

    def test_a_creation_fails(rdma_faults):
        adapter = rdma_faults(NO_QUEUE)
        with pytest.raises(ndpy.NdpyError, match="create completion queue"):
            adapter.create_completion_queue(4)

    @pytest.mark.skipif(sys.platform == "win32", reason="softnd's adapters know nothing of each other")
    def test_adapters_that_were_open_before(rdma_adapter, rdma_faults):
        rdma_faults(FIRST_SEND, allow_unfired=True)
        has_them = session.executor(rdma_adapter.info.name) == "engine"
        with pytest.raises(ndpy.NdpyError) if has_them else contextlib.nullcontext():
            send(rdma_adapter)
        assert len(rdma_faults.report().fired) == has_them

    def test_an_impossible_fault(rdma_faults, rdma_adapter_name):
        impossible = "mute" if session.executor(rdma_adapter_name) == "shim" else "duplicate"
        with pytest.raises(ScenarioError, match=impossible):
            rdma_faults(Fault(impossible, nth=1))

    def test_never(rdma_faults):
        send(rdma_faults(NEVER))

    def test_fails(rdma_faults):
        send(rdma_faults(FIRST_SEND, NEVER))

    def test_a_program_has_them(rdma_faults, rdma_env):
        rdma_faults(NO_QUEUE)
        code = "import ndpy; ndpy.open_adapter().create_completion_queue(4)"
        done = subprocess.run([sys.executable, "-c", code], env=rdma_env, capture_output=True, text=True)
        assert done.returncode == 1 and "create completion queue" in done.stderr

    def creates(adapter, channel):
        try:
            adapter.create_completion_queue(4)
        except ndpy.NdpyError as error:
            return str(error)

    def test_a_peer_has_them(rdma_faults, rdma_peer):
        rdma_faults(NO_QUEUE)
        assert "create completion queue" in rdma_peer(creates).result()

    def forked(adapter):
        with pytest.raises(ndpy.ClosedError, match="opened by the parent process"):
            adapter.create_completion_queue(4)
        adapter.close()
        with ndpy.open_adapter(adapter.info.name) as own:
            own.create_completion_queue(4).close()
            with pytest.raises(ndpy.NdpyError, match="create completion queue"):
                own.create_completion_queue(4)

    @pytest.mark.skipif(sys.platform == "win32", reason="Windows has no fork()")
    def test_a_forked_child_counts_for_itself(rdma_faults):
        adapter = rdma_faults(Fault("errno", call=CALL, nth=3, errno="ENOMEM"))
        with adapter.create_completion_queue(4), adapter.register(bytearray(4096)):
            child = multiprocessing.get_context("fork").Process(target=forked, args=(adapter,))
            child.start()
            child.join(60)
            assert child.exitcode == 0
            adapter.create_completion_queue(4).close()
            with pytest.raises(ndpy.NdpyError, match="create completion queue"):
                adapter.create_completion_queue(4)
        send(adapter)
        assert len({each.pid for each in rdma_faults.report().fired}) == 2

    def test_a_removed_adapter(rdma_faults):
        adapter = rdma_faults(Fault("remove", nth=1))
        with pytest.raises(ndpy.NdpyError):
            send(adapter)

    def test_it_is_there_again(rdma_adapter):
        send(rdma_adapter)

    def test_one_scenario(rdma_faults):
        rdma_faults(NEVER, allow_unfired=True)
        with pytest.raises(RuntimeError, match="a test has one scenario"):
            rdma_faults(NEVER)
"""


# In an emulated VM it takes more than a minute: it starts two processes.
@slow_on_windows
@pytest.mark.timeout(300)
@pytest.mark.parametrize("by", ["own", "shim"])
def test_faults_fire_at_the_adapter_of_their_test_and_are_told(adapter, session, pytester, adapter_name, by):
    require(adapter, ndpy.Capability.REGION_ACCESS)
    if by == "shim":
        if adapter_name != "soft0":
            pytest.skip("drivers have the shim in any case, and Windows has none")
        pytester.makeconftest("from ndpy.testing import session\n\nsession.executor = lambda name: 'shim'\n")
    document = (ROOT / "docs/faults.md").read_text("utf-8")
    (example,) = [block for block in document.split("```python\n") if "def test_a_send_that_fails" in block]
    result = session(textwrap.dedent(FAULTY) + example.partition("```")[0], "-rs", limit_s=240)
    windows = sys.platform == "win32"
    result.assert_outcomes(passed=15 - 2 * windows, failed=1, errors=1, skipped=2 * windows)
    result.stdout.fnmatch_lines(
        [
            "*ERROR at teardown of test_never*",
            "never fired: do=errno at=call call=reg_mr nth=1000 errno=ENOMEM",
            "*test_fails*",
            "*- faults -*",
            "fired: status at send 1 of queue pair *",
            "never fired: do=errno*",
        ]
    )
