"""soft0, the software adapter of this package: who asks for it, and how it stands beside the system's adapters.

A stand-in takes the place of softverbs, so no network is involved.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kit import linux_only as linux_only
from kit.helpers import Replacing, wait_until

import ndpy
from ndpy import platforms
from ndpy.platforms.verbs import adapter_info, device_files, endpoint, native_calls, probing, softverbs
from ndpy.platforms.verbs.interfaces import Interfaces, Place
from ndpy.tools.cli import main
from ndpy.tools.cli import soft as command
from ndpy.tools.doctor import describe_link, linux
from ndpy.tools.doctor.findings import Verdict
from ndpy.vocabulary import quirks, system_files
from ndpy.vocabulary.quirks import Quirk

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def bare(monkeypatch):
    """As on a machine without libibverbs."""
    absent = tuple((variable, f"absent-{name}", thing) for variable, name, thing in native_calls.LIBRARIES)
    for module in (native_calls, linux):
        monkeypatch.setattr(module, "LIBRARIES", absent)
    for variable, _, _ in absent:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    monkeypatch.setattr(native_calls, "_loaded", False)


def in_place_of_the_system(monkeypatch, soft):
    """As `ndpy soft run` does."""
    monkeypatch.setenv("NDPY_LIBIBVERBS", str(soft.path))
    monkeypatch.setenv("NDPY_LIBRDMACM", str(soft.path))
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    monkeypatch.setattr(native_calls, "_loaded", False)


@pytest.fixture
def unusable(soft, monkeypatch, tmp_path):
    """The library of this installation is a file of another kind."""
    folder = tmp_path / "unusable"
    folder.mkdir()
    (folder / softverbs.LIBRARY).write_text("no library")
    monkeypatch.setattr(softverbs, "folder", lambda: folder)


# ---- who gets it ----


def test_it_opens_by_name_on_a_machine_without_libibverbs(bare, soft):
    with ndpy.open_adapter("soft0") as adapter:
        assert adapter.info.name == "soft0"
    assert not native_calls._loaded


def test_the_environment_may_name_it(bare, soft, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    with ndpy.open_adapter() as adapter:
        assert adapter.info.name == "soft0"
    assert [info.name for info in ndpy.list_adapters()] == ["soft0"]
    with ndpy.open_adapter("192.0.2.7") as adapter:
        assert adapter.info.name == "soft0"


@pytest.mark.parametrize("call", [ndpy.open_adapter, ndpy.list_adapters, lambda: ndpy.open_adapter("127.0.0.1")])
def test_it_is_never_taken_by_itself(bare, soft, call):
    with pytest.raises(ndpy.ProviderNotFoundError, match=r"absent-libibverbs.so.1 cannot be used.*NDPY_ADAPTER=soft0"):
        call()
    assert not native_calls._softverbs_loaded


def test_it_is_never_listed_beside_others_by_itself(fake, soft):
    assert [info.name for info in ndpy.list_adapters()] == ["fake0"]
    with ndpy.open_adapter("soft0"):
        assert [info.name for info in ndpy.list_adapters()] == ["fake0"]
        with ndpy.open_adapter() as adapter:
            assert adapter.info.name == "fake0"


def test_the_environment_keeps_nobody_from_the_others(fake, soft, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    assert [info.name for info in ndpy.list_adapters()] == ["soft0"]
    with ndpy.open_adapter("fake0") as adapter:
        assert adapter.info.name == "fake0"
    with pytest.raises(ndpy.AdapterNotFoundError, match=r"no adapter 'other0'; there is soft0 .*, fake0"):
        ndpy.open_adapter("other0")


def test_an_unknown_name_is_refused_with_soft0_on_a_machine_without_libibverbs(bare, soft, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    with pytest.raises(
        ndpy.AdapterNotFoundError, match=r"no adapter 'other0'; there is soft0 \(active at lo; 192.0.2.7"
    ):
        ndpy.open_adapter("other0")


def test_in_place_of_the_systems_libraries_it_is_the_adapter_of_the_machine(soft, monkeypatch):
    in_place_of_the_system(monkeypatch, soft)
    assert [info.name for info in ndpy.list_adapters()] == ["soft0"]
    with ndpy.open_adapter() as adapter:
        assert adapter.info.driver == "softverbs"
    # There is one copy of it.
    assert native_calls.load_for("soft0") == native_calls.lib.NDPY_SYSTEM
    assert not native_calls._softverbs_loaded
    monkeypatch.delenv("NDPY_ADAPTER")
    with ndpy.open_adapter() as adapter:
        assert adapter.info.name == "soft0"
    monkeypatch.undo()
    native_calls._loaded = False


def test_a_checker_may_let_the_list_have_it_for_a_while(fake, soft, monkeypatch):
    for former in ("", "fake0"):
        monkeypatch.setenv("NDPY_ADAPTER", former)
        with platforms.asking_for("soft0"):
            assert [info.name for info in ndpy.list_adapters()] == ["soft0"]
        assert os.environ["NDPY_ADAPTER"] == former
    monkeypatch.delenv("NDPY_ADAPTER")
    for which in (None, "fake0", "soft0"):
        with platforms.asking_for(which):
            assert os.environ.get("NDPY_ADAPTER") == (which if which == "soft0" else None)
        assert "NDPY_ADAPTER" not in os.environ


# ---- where it is ----


@pytest.fixture
def place(tmp_path):
    """A package's folder of the libraries, as in an installation."""
    folder = tmp_path / "ndpy/platforms/verbs/soft"
    folder.mkdir(parents=True)
    return folder


def test_the_libraries_are_in_the_package(place):
    for name in ("libsoftverbs.so", "libibverbs.so.1", "librdmacm.so.1"):
        (place / name).touch()
    assert softverbs.folder(place) == place


@pytest.mark.parametrize("absent", ["libsoftverbs.so", "libibverbs.so.1", "librdmacm.so.1"])
def test_an_installation_without_one_of_them_says_what_to_do(place, absent):
    for name in {"libsoftverbs.so", "libibverbs.so.1", "librdmacm.so.1"} - {absent}:
        (place / name).touch()
    with pytest.raises(ndpy.ProviderNotFoundError, match="ndpy's wheels for Linux contain it: install ndpy again"):
        softverbs.folder(place)


def test_a_checkout_without_them_says_make_softverbs(place, tmp_path):
    (tmp_path / "softrdma").mkdir()
    (tmp_path / "softrdma/Makefile").touch()
    with pytest.raises(ndpy.ProviderNotFoundError, match=f"is not built; run `make softverbs` in {tmp_path} "):
        softverbs.folder(place)


def test_without_them_nothing_advises_to_use_it(monkeypatch, place):
    folder = softverbs.folder
    monkeypatch.setattr(softverbs, "folder", lambda: folder(place))
    assert softverbs.hint() == ""
    assert softverbs.describe_unlisted() == {}
    assert "soft0" not in device_files.why_no_adapter()


def test_a_library_that_cannot_be_loaded_is_named(bare, unusable):
    with pytest.raises(ndpy.ProviderNotFoundError, match=r"libsoftverbs.so cannot be used .*; install ndpy again"):
        ndpy.open_adapter("soft0")


# ---- beside the system's adapters ----


def test_objects_of_both_go_to_their_own_libraries(fake, soft):
    with soft.open() as software, fake.open() as system:
        assert (soft.counts.event_channels, fake.counts.event_channels) == (1, 1)
        for adapter, counts, other in ((software, soft.counts, fake.counts), (system, fake.counts, soft.counts)):
            before = other.left()
            region = adapter.register(bytearray(4096), ndpy.Access.REMOTE_WRITE)
            queue = adapter.create_completion_queue(8)
            queue_pair = adapter.create_queue_pair(queue)
            assert (counts.queues, counts.channels, counts.queue_pairs) == (1, 1, 1)
            queue_pair.receive(region[0:8], context=5)
            provider = soft if adapter is software else fake
            assert provider.complete(queue_pair)
            assert [completion.context for completion in queue.wait(timeout_s=5)] == [5]
            assert other.left() == before
            for thing in (queue_pair, queue, region):
                thing.close()


def test_connections_of_both_go_to_their_own_libraries(fake, soft):
    fake.have_address()
    for provider, others in ((soft, fake), (fake, soft)):
        with others.open(), provider.open() as adapter:
            queue = adapter.create_completion_queue(8)
            queue_pair = adapter.create_queue_pair(queue)
            connector = adapter.create_connector()
            connector.connect(queue_pair, (adapter.info.addresses[0], 7471), timeout_s=5)
            assert others.counts.identifiers <= 1  # the one that waits for the removal of the device
            with adapter.listen((adapter.info.addresses[0], 0)) as listener:
                provider.request(listener)
                listener.get_request(timeout_s=5).close()
            for thing in (connector, queue_pair, queue):
                thing.close()


def test_a_channel_of_softverbs_is_forgotten_when_it_goes(fake, soft):
    """The system's library may get the same address for a channel of its own."""
    for _ in range(3):
        adapters = [soft.open() for _ in range(5)]
        with fake.open() as system:
            assert fake.counts.event_channels == 1
            assert soft.counts.event_channels == 5
            assert system.info.name == "fake0"
            for adapter in adapters:
                adapter.close()


def test_removal_leaves_the_files_of_softverbs_alone(soft, bare, tmp_path):
    """Those of the system are the kernel's, which waits for them. softverbs tells its threads by them."""
    adapter = soft.open()
    files = soft.files_of_manager()
    with (tmp_path / "events").open("w") as events:
        for fd in files:
            os.dup2(events.fileno(), fd)
    soft.remove(adapter)
    wait_until(lambda: adapter._defunct is not None, "the removal is known")
    adapter.close()
    assert [os.readlink(f"/proc/self/fd/{fd}") for fd in files] == [str(tmp_path / "events")] * 2


def test_memory_is_not_kept_from_children_for_it(bare, soft):
    from ndpy.platforms.verbs import allocation

    with soft.open():
        assert not allocation._is_shared_with_children()
    assert not native_calls._loaded


# ---- what it says about itself ----


def test_it_describes_itself(bare, soft):
    with soft.open(windows=1) as adapter:
        info = adapter.info
    assert (info.provider, info.transport, info.driver, info.netdev) == ("verbs", "iWARP", "softverbs", None)
    assert quirks.is_software(info)
    (port,) = info.ports
    assert (port.number, port.link_layer, port.state) == (1, "Ethernet", "active")
    assert ndpy.Capability.READ_SINK_REQUIRED not in info.capabilities
    assert ndpy.Capability.RETRY_POLICY not in info.capabilities
    assert {"IN_ORDER_DMA", "LOOPBACK_CONNECTIONS", "MEMORY_WINDOWS", "REFUSE_OFFER"} <= set(info.capabilities.names())


def test_its_addresses_are_those_of_the_machine_routable_ones_first(bare, soft):
    with soft.open() as adapter:
        assert adapter.info.addresses == ("192.0.2.7", "2001:db8::7", "127.0.0.1", "::1", "fe80::1%lo")


@pytest.mark.parametrize("count", [10, 11, 12, 100])
def test_it_may_have_many_addresses(bare, soft, count):
    soft.variable("fake_softverbs").many = count
    with soft.open() as adapter:
        assert len(adapter.info.addresses) == 5 + count
        assert f"198.51.100.{count}" in adapter.info.addresses


@pytest.mark.parametrize("failure", [-1, -12])
def test_a_machine_that_does_not_tell_its_addresses_has_none(bare, soft, failure):
    soft.variable("fake_softverbs").failure = failure
    assert platforms.find("soft0").addresses == ()


def test_its_gids_are_addresses(bare, soft, monkeypatch, tmp_path):
    values = {0: bytes(10) + b"\xff\xff\x7f\0\0\1", 1: bytes(10) + b"\xff\xff\xc0\0\2\7", 2: bytes(15) + b"\1"}

    def query(context, port, index, gid):
        native_calls.ffi.buffer(gid)[:] = values.get(index, bytes(16))
        return int(index > 3)

    monkeypatch.setattr(adapter_info, "lib", Replacing(native_calls.lib, ibv_query_gid=query))
    monkeypatch.setattr(adapter_info, "has_symbol", lambda name, library: False)
    table = adapter_info._gid_tables(None, "soft0", {1: 8}, 1)[1]
    gids = adapter_info._gids("soft0", Place(tmp_path, 1, 1), table, True, Interfaces())
    assert [(gid.index, gid.address, gid.type) for gid in gids] == [
        (0, "127.0.0.1", "iWARP"),
        (1, "192.0.2.7", "iWARP"),
        (2, "::1", "iWARP"),
    ]
    # An endpoint is for peers on other hosts too.
    assert min(gids, key=endpoint.rank).address == "192.0.2.7"


def test_it_is_described_without_a_second_look_at_any_file(bare, soft, monkeypatch):
    soft.open().close()
    opened = []
    opens = os.open
    monkeypatch.setattr(os, "open", lambda place, *more: (opened.append(str(place)), opens(place, *more))[1])
    platforms.find("soft0")
    assert any("/class/net/" in name for name in opened)
    assert len(opened) == len(set(opened))


@pytest.mark.parametrize("resizable", [True, False])
def test_it_says_whether_completion_queues_can_be_resized(bare, soft, monkeypatch, resizable):
    native = Replacing(native_calls.lib, ibv_resize_cq=lambda queue, size: 0 if resizable else 95)
    monkeypatch.setattr(probing, "lib", native)
    with soft.open() as adapter:
        assert (ndpy.Capability.RESIZE_COMPLETION_QUEUE in adapter.info.capabilities) is resizable


def test_it_lacks_the_quirks_of_iwarp_that_it_does_not_have(bare, soft):
    with soft.open() as adapter:
        has = {quirk for quirk in Quirk if quirk.value.transport == "iWARP" and quirk in adapter._quirks}
    assert has == {Quirk.IWARP_NO_IMMEDIATE_DATA, Quirk.IWARP_NO_PATH_MTU}
    assert not any(quirk.value.driver for quirk in adapter._quirks)


def test_its_link_is_what_the_machine_has(bare, soft):
    link = describe_link("soft0")
    assert (link.adapter, link.transport, link.netdev, link.link_mtu) == ("soft0", "iWARP", None, None)
    assert link.addresses[0] == "192.0.2.7"


# ---- messages ----


def test_a_machine_without_an_adapter_is_told_of_it(soft, monkeypatch, tmp_path):
    monkeypatch.setattr(system_files, "_root", tmp_path)
    why = device_files.why_no_adapter()
    assert "NDPY_ADAPTER=soft0" in why and "`ndpy smoke soft0`" in why
    with pytest.raises(ndpy.AdapterNotFoundError, match=r"this machine has no RDMA adapter; .*NDPY_ADAPTER=soft0"):
        platforms.choose([], None)


def test_who_asks_for_it_is_not_told_to_ask_for_it(soft, bare, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    assert softverbs.hint() == ""


def invoke(*words):
    return CliRunner().invoke(main, words)


def test_devices_says_that_it_is_there_and_how_to_use_it(fake, soft):
    output = invoke("devices").output
    assert re.search(r"^fake0 ", output, re.MULTILINE)
    assert (
        "soft0, the software adapter of this package (iWARP over TCP), is there too. It is taken only by name" in output
    )
    assert "`ndpy soft run -- COMMAND`" in output
    assert [info["name"] for info in json.loads(invoke("devices", "--json").output)] == ["fake0"]


def test_devices_lists_it_by_name(fake, soft, monkeypatch):
    output = invoke("devices", "soft0").output
    assert re.search(r"^soft0 +verbs +iWARP +active +192\.0\.2\.7 .*softverbs", output, re.MULTILINE)
    assert "is there too" not in output
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    output = invoke("devices").output
    assert "soft0 " in output and "fake0" not in output and "is there too" not in output


def test_devices_without_libibverbs_names_it(bare, soft):
    result = invoke("devices")
    assert result.exit_code == 1
    assert "NDPY_ADAPTER=soft0" in result.output


def test_the_doctor_says_that_it_works_and_how_to_use_it(bare, soft):
    (finding,) = linux.examine_softverbs()
    assert (finding.check, finding.verdict) == ("soft0", Verdict.PASS)
    assert "software adapter of this package works: iWARP over TCP" in finding.message
    assert "`ndpy soft run -- COMMAND`" in finding.message and "192.0.2.7" in finding.message


def test_the_doctor_only_warns_without_it_unless_it_was_asked_for(bare, unusable, monkeypatch):
    (finding,) = linux.examine_softverbs()
    assert (finding.verdict, finding.remedy) == (Verdict.WARN, "install ndpy again (ndpy explain no-library)")
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    (finding,) = linux.examine_softverbs()
    assert finding.verdict is Verdict.FAIL


def test_the_doctor_examines_only_it_if_it_was_asked_for(bare, soft, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    asked = []
    monkeypatch.setattr(linux, "examine_apart", lambda *words: asked.append(words) or list(linux.examine_softverbs()))
    finding, files = linux.diagnose()
    assert [function for _, _, function in asked] == ["examine_softverbs"]
    assert "the kernel and its devices were not examined" in finding.message
    assert files.check == "open files"


@pytest.mark.parametrize("environment", ["", "soft0", "rxe0"])
def test_the_doctor_examines_it_by_name_on_a_machine_without_a_card(bare, soft, monkeypatch, environment):
    monkeypatch.setenv("NDPY_ADAPTER", environment)
    monkeypatch.setattr(linux, "examine_apart", lambda check, module, function: list(getattr(linux, function)()))
    result = invoke("doctor", "soft0", "--json")
    assert result.exit_code == 0, result.output
    assert [finding["check"] for finding in json.loads(result.stdout)] == ["ndpy", "soft0", "open files"]
    assert "it was asked for, so the kernel and its devices were not examined" in result.stdout


def test_the_doctor_of_another_adapter_leaves_it_out(bare, soft, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    asked = []
    monkeypatch.setattr(linux, "examine_apart", lambda *words: asked.append(words) or [])
    result = invoke("doctor", "rxe0", "--json")
    assert result.exit_code == 1
    assert [(function, *words) for _, _, function, *words in asked] == [
        ("examine_libraries",),
        ("examine_devices", "rxe0"),
    ]
    last = json.loads(result.stdout)[-1]
    assert (last["check"], last["remedy"]) == ("rxe0", "`ndpy devices` lists the adapters")


def test_the_smoke_test_says_that_it_is_software(bare, soft, tmp_path):
    result = invoke("smoke", "soft0", "--only", "enumerate", "--json", str(tmp_path / "out.json"))
    last = result.output.splitlines()[-1]
    assert re.fullmatch(r"smoke: \d+ passed, \d+ failed, 0 known, \d+ skipped on soft0 \(verbs, software\)", last)
    assert json.loads((tmp_path / "out.json").read_text())["software"] is True
    passed = re.findall(r"^PASS +enumerate/([\w-]+)", result.output, re.MULTILINE)
    assert {"listed", "by-address", "unknown-name", "port-active"} <= set(passed), result.output
    assert "NDPY_ADAPTER" not in os.environ


# ---- ndpy soft ----


def soft_command(folder, *words, code="", **environment):
    """Run `ndpy soft` as a command whose libraries are in this folder."""
    program = (
        "import pathlib, sys; from ndpy.platforms.verbs import softverbs; softverbs.folder = lambda: "
        f"pathlib.Path({str(folder)!r})\n{code}\nfrom ndpy.tools.cli import main; main()"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NDPY_", "LD_LIBRARY"))}
    return subprocess.run(
        [sys.executable, "-c", program, "soft", *words],
        env={**clean, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


SHOW = "import os, sys; print(*(os.environ[name] for name in sys.argv[1:]), sep='\\n')"


def test_run_gives_the_command_soft0(tmp_path):
    names = ("LD_LIBRARY_PATH", "NDPY_LIBIBVERBS", "NDPY_LIBRDMACM", "NDPY_ADAPTER")
    done = soft_command(tmp_path, "run", "--", sys.executable, "-c", SHOW, *names)
    library = str(tmp_path / "libsoftverbs.so")
    assert done.stdout.splitlines() == [str(tmp_path), library, library, "soft0"], done.stderr


def test_run_keeps_what_the_environment_has(tmp_path):
    former = {"LD_LIBRARY_PATH": "/first:/second", "NDPY_ADAPTER": "192.0.2.7"}
    done = soft_command(tmp_path, "run", sys.executable, "-c", SHOW, *former, **former)
    assert done.stdout.splitlines() == [f"{tmp_path}:/first:/second", "192.0.2.7"]


def test_run_passes_options_on_to_the_command(tmp_path):
    done = soft_command(tmp_path, "run", sys.executable, "-c", "import sys; print(sys.argv[1:])", "--help", "-x", "--")
    assert done.stdout == "['--help', '-x', '--']\n"


@pytest.mark.parametrize("code", ["sys.exit(7)", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"])
def test_the_exit_status_is_that_of_the_command(tmp_path, code):
    done = soft_command(tmp_path, "run", sys.executable, "-c", f"import sys; {code}")
    assert done.returncode == (7 if "exit" in code else -signal.SIGTERM)


def test_the_command_has_the_signals_of_the_shell(tmp_path):
    """Python ignores SIGPIPE and SIGXFSZ."""
    done = soft_command(tmp_path, "run", "grep", "SigIgn", "/proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored >> (signal.SIGPIPE - 1) & 1
    assert not ignored >> (signal.SIGXFSZ - 1) & 1


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["run"], 2, "Missing argument"),
        (["run", "--"], 2, "Missing argument"),
        (["run", "no-such-command"], 127, "ndpy soft: no-such-command cannot be run: No such file or directory"),
        (["run", "/etc"], 126, "ndpy soft: /etc cannot be run: "),
        (["run", ""], 126, "cannot be run"),
    ],
)
def test_a_command_that_cannot_be_run(tmp_path, words, status, said):
    done = soft_command(tmp_path, *words)
    assert done.returncode == status
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_path_prints_the_folder(tmp_path):
    assert soft_command(tmp_path, "path").stdout == f"{tmp_path}\n"


@pytest.mark.parametrize("words", [["path"], ["run", "true"]])
def test_without_the_libraries_it_says_what_to_do(tmp_path, words):
    code = (
        "real = softverbs.folder\nfrom ndpy import errors\ndef absent(): raise errors.ProviderNotFoundError('none "
        "here')\nsoftverbs.folder = absent"
    )
    done = soft_command(tmp_path, *words, code=code)
    assert (done.returncode, done.stdout, done.stderr) == (125, "", "ndpy soft: none here (ndpy explain no-library)\n")


@pytest.mark.parametrize("words", [["path"], ["run", "true"]])
def test_other_systems_have_none(monkeypatch, words):
    monkeypatch.setattr(command.sys, "platform", "win32")
    result = invoke("soft", *words)
    assert result.exit_code == 125
    assert "softverbs is for Linux, and this is win32" in result.output
