"""`ndpy doctor` and `ndpy softnd` on Windows: with softnd, without a provider, and with broken providers.

`make -C tests/networkdirect/providers` builds the broken ones.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

if sys.platform != "win32":
    pytest.skip("NetworkDirect is Windows'", allow_module_level=True)

from kit.starting import create_process

import ndpy
from ndpy.platforms.networkdirect import adapter_info, dll_header, native_calls, softnd_installation, winsock_catalogue
from ndpy.tools.doctor import findings, windows

ROOT = Path(__file__).resolve().parent.parent.parent
SOFTND = ROOT / "softrdma/build/softnd.dll"
BROKEN = ROOT / "softrdma/build/providers"


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NDPY_")}
    # An embedded Python searches neither the working folder nor PYTHONPATH.
    code = f"import sys; sys.path[:0] = {sys.path!r}; from ndpy.tools.cli import main; main({list(words)!r})"
    return create_process(
        lambda: subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**clean, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=100,
        )
    )


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = command("doctor", "--json", **environment)
    assert done.stderr == ""
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)}


def examined(name: str, provider_id: str = windows._NO_ID, version: str = "") -> dict[str, findings.Finding]:
    """The findings about one of the broken providers."""
    path = BROKEN / f"{name}.dll"
    if not path.exists():
        pytest.skip("not built: make -C tests/networkdirect/providers")
    found = list(windows.examine_dll("it", str(path), provider_id, findings.failed, version))
    return {each.check: each for each in found}


def verdict(found: findings.Finding) -> str:
    return found.verdict.value


def test_with_softnd_all_but_the_catalogue_passes():
    status, found = doctor(NDPY_PROVIDER=str(SOFTND))
    assert status == 0
    assert {check for check, each in found.items() if each["verdict"] != "PASS"} <= {"catalogue"}
    for check in (
        "process",
        "NDPY_PROVIDER",
        "softnd.dll DLL",
        "softnd.dll version",
        "softnd.dll addresses",
        "softnd0",
    ):
        assert check in found
    assert str(SOFTND) in found["softnd.dll DLL"]["message"]
    assert "x64" in found["softnd.dll DLL"]["message"]
    assert "127.0.0.1" in found["softnd.dll addresses"]["message"]
    assert "version 2" in found["softnd.dll version"]["message"]


def test_with_nothing_it_fails_and_names_what_to_install_or_set():
    if winsock_catalogue.entries():
        pytest.skip("this machine's catalogue has a provider")
    status, found = doctor()
    assert status == 1
    assert found["catalogue"]["verdict"] == "FAIL"
    assert "NDPY_PROVIDER" in found["catalogue"]["remedy"]
    assert "ndpy softnd" in found["adapters"]["remedy"]


def test_a_provider_named_in_the_environment_that_is_not_there_fails():
    status, found = doctor(NDPY_PROVIDER="C:\\none.dll")
    assert status == 1
    assert found["none.dll DLL"]["verdict"] == "FAIL"
    assert "does not exist" in found["none.dll DLL"]["message"]


@pytest.mark.parametrize(("name", "export"), [("NO_EXPORTS", "DllGetClassObject"), ("ONE_EXPORT", "DllCanUnloadNow")])
def test_a_2_4_a_missing_export_is_named(name, export):
    found = examined(name)["it DLL"]
    assert verdict(found) == "FAIL"
    assert export in found.message


def test_a_provider_of_version_1_only_is_said_to_be_one():
    found = examined("VERSION_1")
    assert verdict(found["it DLL"]) == "PASS"
    assert verdict(found["it version"]) == "PASS"
    assert found["it version"].message.endswith("version 1")
    assert "127.0.0.2" in found["it addresses"].message


def test_a_version_that_is_asked_for_and_not_served_fails():
    for name, version, other in (("VERSION_1", "2", "1"), ("UNLOADS", "1", "2")):
        found = examined(name, version=version)["it version"]
        assert verdict(found) == "FAIL"
        assert f"version {other} only" in found.message
        assert "NDPY_PROVIDER_VERSION" in found.remedy


def test_with_softnd_as_version_1():
    status, found = doctor(NDPY_PROVIDER=str(SOFTND), NDPY_PROVIDER_VERSION="1")
    assert status == 0
    assert "version 1" in found["softnd.dll version"]["message"]
    assert "NetworkDirect 1" in found["softnd0"]["message"]
    assert "127.0.0.1" in found["softnd.dll addresses"]["message"]


def test_a_provider_without_the_interface_fails_with_its_status():
    found = examined("NO_INTERFACE")["it version"]
    assert verdict(found) == "FAIL"
    assert "E_NOINTERFACE" in found.message


def test_a_provider_without_an_address_is_warned():
    found = examined("NO_ADDRESS")
    assert verdict(found["it version"]) == "PASS"
    assert verdict(found["it addresses"]) == "WARN"


@pytest.mark.parametrize(("name", "words"), [("CRASHES", "status"), ("EXITS", "status 7")])
def test_a_provider_that_ends_the_process_does_not_end_the_doctor(name, words):
    found = examined(name)["it DLL"]
    assert verdict(found) == "FAIL"
    assert words in found.message


def test_a_provider_that_hangs_does_not_hang_the_doctor(monkeypatch):
    monkeypatch.setattr(windows, "_LIMIT_S", 10.0)
    found = examined("HANGS")["it DLL"]
    assert verdict(found) == "FAIL"
    assert "hangs" in found.message


def test_a_dll_of_the_wrong_bitness_is_named_without_loading_it(tmp_path):
    path = tmp_path / "x86.dll"
    path.write_bytes((b"MZ" + bytes(58) + struct.pack("<I", 64)) + b"PE\0\0" + struct.pack("<H", 0x14C) + bytes(64))
    (found,) = windows.examine_dll("it", str(path), windows._NO_ID, findings.failed)
    assert verdict(found) == "FAIL"
    assert "x86" in found.message
    assert "x64" in found.message


def entry(path: Path, **values: object) -> winsock_catalogue.Entry:
    fields = {"name": "it", "provider_id": uuid.uuid4().bytes_le, "version": 2, "families": ("IPv4",), "problem": ""}
    return winsock_catalogue.Entry(path=str(path), **(fields | values))


@pytest.fixture
def registered(monkeypatch):
    """Make the catalogue return these entries. Wine's catalogue cannot be changed."""
    monkeypatch.delenv("NDPY_PROVIDER", raising=False)
    return lambda *entries: monkeypatch.setattr(winsock_catalogue, "entries", lambda: list(entries))


def test_an_entry_that_can_be_used_passes(registered):
    registered(entry(SOFTND))
    found = {each.check: each for each in windows.examine_catalogue()}
    assert {verdict(each) for each in found.values()} == {"PASS"}
    assert "1 of its 1" in found["catalogue"].message
    assert str(SOFTND) in found["it"].message


def test_an_entry_of_version_1_is_judged_by_version_1(registered):
    registered(entry(SOFTND, version=1, name="one"), entry(BROKEN / "UNLOADS.dll", version=1, name="two"))
    found = {each.check: each for each in windows.examine_catalogue()}
    assert verdict(found["one version"]) == "PASS"
    assert found["one version"].message.endswith("version 1")
    assert verdict(found["two version"]) == "FAIL"
    assert "version 2 only" in found["two version"].message
    assert "1 of its 2" in found["catalogue"].message


def test_a_stale_entry_is_warned_and_another_may_still_be_used(registered):
    registered(entry(ROOT / "gone.dll", name="gone"), entry(SOFTND))
    found = {each.check: each for each in windows.examine_catalogue()}
    assert verdict(found["gone DLL"]) == "WARN"
    assert "does not exist" in found["gone DLL"].message
    assert verdict(found["catalogue"]) == "PASS"
    assert "1 of its 2" in found["catalogue"].message


def test_an_entry_that_is_nearly_right_is_told(registered):
    registered(entry(SOFTND, problem="NetworkDirect programs overlook it: its version is 0x7"))
    found = {each.check: each for each in windows.examine_catalogue()}
    assert verdict(found["it"]) == "WARN"
    assert "version is 0x7" in found["it"].message
    assert verdict(found["catalogue"]) == "FAIL"


# ---- in this process, where a mistake is visible ----


def provided(path: Path, provider_id: str = windows._NO_ID, version: str = "") -> dict[str, findings.Finding]:
    """The findings that examine_dll() gets from a separate process, made in this one."""
    if not path.exists():
        pytest.skip("not built: make softnd, make -C tests/networkdirect/providers")
    return {each.check: each for each in windows.examine_provider("it", str(path), provider_id, version)}


def test_a_provider_of_both_versions_is_said_to_be_one():
    for version, words in (("", "version 2 and version 1, which NDPY_PROVIDER_VERSION=1 asks for"), ("1", "version 1")):
        found = provided(SOFTND, version=version)
        assert {verdict(each) for each in found.values()} == {"PASS"}
        assert found["it version"].message.endswith(f"NetworkDirect {words}")
        assert "127.0.0.1" in found["it addresses"].message
        assert found["it addresses"].message.startswith(f"{1 if version == '' else 2} adapter(s)") or version
    # An unknown version chooses none. open_adapter() reports it.
    assert provided(SOFTND, version="two")["it version"] == provided(SOFTND)["it version"]
    assert provided(BROKEN / "UNLOADS.dll")["it version"].message.endswith("version 2")
    assert provided(BROKEN / "VERSION_1.dll")["it version"].message.endswith("version 1")


def test_the_remedy_is_for_what_is_wrong():
    ours, drivers = windows._NO_ID, str(uuid.uuid4())
    for name, provider_id, version, remedy in (
        # A DLL that was named can be used with its other version. A driver's entry is for one version only.
        ("UNLOADS", ours, "1", windows._OTHER_VERSION),
        ("VERSION_1", ours, "2", windows._OTHER_VERSION),
        ("UNLOADS", drivers, "1", windows._DRIVER),
        ("NO_INTERFACE", ours, "", windows._ANOTHER),
        ("NO_INTERFACE", ours, "1", windows._ANOTHER),
        ("NO_INTERFACE", drivers, "2", windows._DRIVER),
        ("UNKNOWN_STATUS", ours, "", windows._ANOTHER),
        ("UNKNOWN_STATUS", drivers, "", windows._DRIVER),
    ):
        found = provided(BROKEN / f"{name}.dll", provider_id, version)["it version"]
        assert (verdict(found), found.remedy) == ("FAIL", remedy), (name, provider_id, version)
    for provider_id, remedy in ((ours, windows._ANOTHER), (drivers, windows._DRIVER)):
        (found,) = provided(BROKEN / "NO_EXPORTS.dll", provider_id).values()
        assert (found.check, verdict(found), found.remedy) == ("it DLL", "FAIL", remedy)


def test_a_provider_without_an_address_is_told_how_to_get_one():
    found = provided(BROKEN / "NO_ADDRESS.dll")
    assert list(found) == ["it DLL", "it version", "it addresses"]
    assert verdict(found["it addresses"]) == "WARN"
    assert "Enable-NetAdapterRdma" in found["it addresses"].remedy


def test_what_the_environment_names_is_examined_and_said(monkeypatch):
    apart: list[tuple[object, ...]] = []

    def record(*arguments: object, **_: object) -> list[findings.Finding]:
        apart.append(arguments)
        return [findings.passed(f"{arguments[0]}", "as it should be")]

    monkeypatch.setattr(windows, "examine_apart", record)
    monkeypatch.setattr(winsock_catalogue, "entries", list)
    monkeypatch.setenv("NDPY_PROVIDER", os.pathsep.join((str(SOFTND), "", "C:\\none.dll")))
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", "1")
    found = {each.check: each for each in windows.diagnose()}
    assert str(SOFTND) in found["NDPY_PROVIDER"].message
    assert "C:\\none.dll" in found["NDPY_PROVIDER"].message
    assert "version 1 only" in found["NDPY_PROVIDER_VERSION"].message
    assert verdict(found["none.dll DLL"]) == "FAIL"
    assert verdict(found["catalogue"]) == "WARN"
    assert apart[0][3:] == ("softnd.dll", str(SOFTND), windows._NO_ID, "1")
    assert [arguments[0] for arguments in apart] == ["softnd.dll DLL", "adapters"]
    monkeypatch.delenv("NDPY_PROVIDER_VERSION")
    assert "NDPY_PROVIDER_VERSION" not in {each.check for each in windows.diagnose()}
    monkeypatch.delenv("NDPY_PROVIDER")
    found = {each.check: each for each in windows.diagnose()}
    assert "NDPY_PROVIDER" not in found
    assert verdict(found["catalogue"]) == "FAIL"


def test_a_program_of_32_bits_python_is_warned(monkeypatch):
    monkeypatch.setattr(dll_header, "own_machine", lambda: "x86")
    found = windows.examine_process()
    assert (found.check, verdict(found)) == ("process", "WARN")
    assert "64-bit" in found.remedy
    monkeypatch.setattr(dll_header, "own_machine", lambda: "arm64")
    found = windows.examine_process()
    assert verdict(found) == "PASS"
    assert "arm64 program, which can load arm64" in found.message


def adapters(monkeypatch, *infos: ndpy.AdapterInfo) -> dict[str, findings.Finding]:
    monkeypatch.setattr(adapter_info, "list_adapters", lambda: list(infos))
    return {each.check: each for each in windows.examine_adapters()}


def test_the_adapters_of_this_machine_are_told_with_their_state(monkeypatch):
    monkeypatch.setenv("NDPY_PROVIDER", str(SOFTND))
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", "2")
    (info,) = adapter_info.list_adapters()
    down = dataclasses.replace(info, name="idle", state="down", netdev=None, mtu=0)
    found = adapters(monkeypatch, info, down)
    assert [verdict(each) for each in found.values()] == ["PASS", "WARN"]
    assert "NetworkDirect 2" in found[info.name].message
    assert "127.0.0.1" in found[info.name].message
    assert "down, NetworkDirect 2, no interface, MTU unknown" in found["idle"].message
    found = adapters(monkeypatch, down)
    assert [verdict(each) for each in found.values()] == ["WARN", "FAIL"]
    assert "no adapter is active" in found["active adapter"].message


def test_a_machine_without_adapters_is_told_what_to_do(monkeypatch):
    monkeypatch.delenv("NDPY_PROVIDER", raising=False)
    found = adapters(monkeypatch)["adapters"]
    assert verdict(found) == "FAIL"
    assert "no NetworkDirect provider" in found.message
    assert "install the adapter's driver" in found.remedy
    monkeypatch.setenv("NDPY_PROVIDER", "C:\\some.dll")
    found = adapters(monkeypatch)["adapters"]
    assert "serves no address" in found.message
    assert found.remedy == winsock_catalogue.NO_ADDRESS_REMEDY

    def fail() -> list[ndpy.AdapterInfo]:
        raise OSError("the registry cannot be read")

    monkeypatch.setattr(adapter_info, "list_adapters", fail)
    (found,) = windows.examine_adapters()
    assert (found.check, verdict(found), found.message) == ("adapters", "FAIL", "the registry cannot be read")


def test_an_interface_that_is_up_and_one_that_windows_does_not_show(monkeypatch):
    up = type("Address", (), {"address": "fe80::1%7"})
    monkeypatch.setattr(
        windows.interfaces.psutil,
        "net_if_addrs",
        lambda: {"port": [up], "wire": [type(up)("A", (), {"address": "00-11"})]},
    )
    monkeypatch.setattr(windows.interfaces.psutil, "net_if_stats", dict)
    found = list(windows._examine_interfaces("it", ["fe80::1%9", "127.0.0.1", "192.0.2.1", "?"]))
    assert [verdict(each) for each in found] == ["WARN", "WARN", "PASS"]
    assert "192.0.2.1 is not an address" in found[0].message
    assert "? is not an address" in found[1].message
    assert found[2].message == "up: port"


def test_addresses_of_no_interface_are_warned():
    found = list(windows._examine_interfaces("it", ["203.0.113.77", "127.0.0.1"]))
    assert [verdict(each) for each in found if "203.0.113.77" in each.message] == ["WARN"]


def test_an_interface_that_is_down_is_warned(monkeypatch):
    address = type("Address", (), {"address": "192.0.2.9"})
    monkeypatch.setattr(windows.interfaces.psutil, "net_if_addrs", lambda: {"port": [address]})
    monkeypatch.setattr(windows.interfaces.psutil, "net_if_stats", lambda: {"port": type("Stats", (), {"isup": False})})
    (found,) = windows._examine_interfaces("it", ["192.0.2.9"])
    assert verdict(found) == "WARN"
    assert "port is down" in found.message


def test_this_machines_catalogue_can_be_read():
    protocols = winsock_catalogue.protocols()
    assert protocols
    tcp = [protocol for protocol in protocols if (protocol.address_family, protocol.protocol) == (2, 6)]
    assert tcp
    assert not winsock_catalogue.judge(tcp[0]).meant


def test_the_extension_module_gives_winsock_the_entry_as_it_is(monkeypatch):
    given = []

    class Calls:
        def ndpy_install_provider(self, provider_id, path, native):
            given.append(
                (bytes(provider_id), path, native.version, native.socket_type, native_calls.ffi.string(native.name))
            )
            return 0

    monkeypatch.setattr(native_calls, "lib", Calls())
    softnd_installation._install(SOFTND)
    assert given == [(softnd_installation.PROVIDER_ID.bytes_le, str(SOFTND), 0x20000, -1, softnd_installation.NAME)]


@pytest.mark.parametrize("administrator", [0, 1])
def test_only_who_is_no_administrator_is_told_to_be_one(monkeypatch, native, administrator):
    native.answer("ndpy_install_provider", 10013)
    monkeypatch.setattr(ctypes.windll.shell32, "IsUserAnAdmin", lambda: administrator)
    with pytest.raises(ndpy.ProviderError) as caught:
        softnd_installation._install(SOFTND)
    assert isinstance(caught.value, PermissionError) is not bool(administrator)
    assert caught.value.native == 10013


def test_the_path_of_softnd_is_printed():
    if not SOFTND.exists():
        pytest.skip("softnd.dll is not built")
    done = command("softnd", "path")
    assert done.returncode == 0
    assert Path(done.stdout.strip()) == SOFTND


def is_wine() -> bool:
    return hasattr(ctypes.windll.ntdll, "wine_get_version")


def test_wines_catalogue_cannot_be_changed_and_registering_says_so():
    """Wine's WSCInstallProvider reports success and does nothing."""
    if not is_wine():
        pytest.skip("Windows' catalogue can be changed, and this test leaves it alone")
    done = command("softnd", "register", "--json")
    assert done.returncode == 1
    assert "NDPY_PROVIDER=" in json.loads(done.stdout)["error"]
    assert "was not registered" in command("softnd", "unregister").stdout


def test_a_registered_softnd_is_found_by_its_entry(tmp_path):
    """Runs only with NDPY_TEST_REGISTER=1, as an administrator, on a Windows machine that you own."""
    if not os.environ.get("NDPY_TEST_REGISTER"):
        pytest.skip("changes the machine's catalogue; NDPY_TEST_REGISTER=1 allows that")
    path = Path(shutil.copy(SOFTND, tmp_path))
    softnd_installation.register(path)
    try:
        status, found = doctor()
        assert status == 0
        assert found[softnd_installation.NAME]["verdict"] == "PASS"
        assert softnd_installation.registered(1) is not None
    finally:
        softnd_installation.unregister()
    assert softnd_installation.registered() is softnd_installation.registered(1) is None
