"""`ndpy doctor` and `ndpy softnd` on Windows: with softnd, with nothing, and with providers that are broken.

The broken ones are built by `make -C tests/networkdirect/providers`.
"""

from __future__ import annotations

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

from ndpy import finding
from ndpy.networkdirect import catalogue, diagnosis, softnd

ROOT = Path(__file__).resolve().parent.parent.parent
SOFTND = ROOT / "softnd/build/softnd.dll"
BROKEN = ROOT / "softnd/build/providers"


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NDPY_")}
    # An embedded Python looks neither in the working folder nor in PYTHONPATH.
    code = f"import sys; sys.path[:0] = {sys.path!r}; from ndpy.cli import main; main({list(words)!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**clean, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
    )


def doctor(**environment: str) -> tuple[int, dict[str, dict[str, str]]]:
    done = command("doctor", "--json", **environment)
    assert done.stderr == ""
    return done.returncode, {found["check"]: found for found in json.loads(done.stdout)}


def examined(name: str, provider_id: str = diagnosis._NO_ID, version: str = "") -> dict[str, finding.Finding]:
    """What is found of one of the broken providers."""
    path = BROKEN / f"{name}.dll"
    if not path.exists():
        pytest.skip("not built: make -C tests/networkdirect/providers")
    found = list(diagnosis.examine_dll("it", str(path), provider_id, finding.failed, version))
    return {each.check: each for each in found}


def verdict(found: finding.Finding) -> str:
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
    if catalogue.entries():
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
    monkeypatch.setattr(diagnosis, "_LIMIT_S", 10.0)
    found = examined("HANGS")["it DLL"]
    assert verdict(found) == "FAIL"
    assert "hangs" in found.message


def test_a_dll_of_the_wrong_bitness_is_named_without_loading_it(tmp_path):
    path = tmp_path / "x86.dll"
    path.write_bytes((b"MZ" + bytes(58) + struct.pack("<I", 64)) + b"PE\0\0" + struct.pack("<H", 0x14C) + bytes(64))
    (found,) = diagnosis.examine_dll("it", str(path), diagnosis._NO_ID, finding.failed)
    assert verdict(found) == "FAIL"
    assert "x86" in found.message
    assert "x64" in found.message


def entry(path: Path, **values: object) -> catalogue.Entry:
    fields = {"name": "it", "provider_id": uuid.uuid4().bytes_le, "version": 2, "families": ("IPv4",), "problem": ""}
    return catalogue.Entry(path=str(path), **(fields | values))


@pytest.fixture
def registered(monkeypatch):
    """Let the catalogue have these entries; Wine's cannot be changed."""
    monkeypatch.delenv("NDPY_PROVIDER", raising=False)
    return lambda *entries: monkeypatch.setattr(catalogue, "entries", lambda: list(entries))


def test_an_entry_that_can_be_used_passes(registered):
    registered(entry(SOFTND))
    found = {each.check: each for each in diagnosis.examine_catalogue()}
    assert {verdict(each) for each in found.values()} == {"PASS"}
    assert "1 of its 1" in found["catalogue"].message
    assert str(SOFTND) in found["it"].message


def test_an_entry_of_version_1_is_judged_by_version_1(registered):
    registered(entry(SOFTND, version=1, name="one"), entry(BROKEN / "UNLOADS.dll", version=1, name="two"))
    found = {each.check: each for each in diagnosis.examine_catalogue()}
    assert verdict(found["one version"]) == "PASS"
    assert found["one version"].message.endswith("version 1")
    assert verdict(found["two version"]) == "FAIL"
    assert "version 2 only" in found["two version"].message
    assert "1 of its 2" in found["catalogue"].message


def test_a_stale_entry_is_warned_and_another_may_still_be_used(registered):
    registered(entry(ROOT / "gone.dll", name="gone"), entry(SOFTND))
    found = {each.check: each for each in diagnosis.examine_catalogue()}
    assert verdict(found["gone DLL"]) == "WARN"
    assert "does not exist" in found["gone DLL"].message
    assert verdict(found["catalogue"]) == "PASS"
    assert "1 of its 2" in found["catalogue"].message


def test_an_entry_that_is_nearly_right_is_told(registered):
    registered(entry(SOFTND, problem="NetworkDirect programs overlook it: its version is 0x7"))
    found = {each.check: each for each in diagnosis.examine_catalogue()}
    assert verdict(found["it"]) == "WARN"
    assert "version is 0x7" in found["it"].message
    assert verdict(found["catalogue"]) == "FAIL"


def test_addresses_of_no_interface_are_warned():
    found = list(diagnosis._examine_interfaces("it", ["203.0.113.77", "127.0.0.1"]))
    assert [verdict(each) for each in found if "203.0.113.77" in each.message] == ["WARN"]


def test_an_interface_that_is_down_is_warned(monkeypatch):
    address = type("Address", (), {"address": "192.0.2.9"})
    monkeypatch.setattr(diagnosis.psutil, "net_if_addrs", lambda: {"port": [address]})
    monkeypatch.setattr(diagnosis.psutil, "net_if_stats", lambda: {"port": type("Stats", (), {"isup": False})})
    (found,) = diagnosis._examine_interfaces("it", ["192.0.2.9"])
    assert verdict(found) == "WARN"
    assert "port is down" in found.message


def test_this_machines_catalogue_can_be_read():
    protocols = catalogue.protocols()
    assert protocols
    tcp = [protocol for protocol in protocols if (protocol.address_family, protocol.protocol) == (2, 6)]
    assert tcp
    assert not catalogue.judge(tcp[0]).meant


def test_the_extension_module_gives_winsock_the_entry_as_it_is(monkeypatch):
    from ndpy.networkdirect import library

    given = []

    class Calls:
        def ndpy_install_provider(self, provider_id, path, native):
            given.append(
                (bytes(provider_id), path, native.version, native.socket_type, library.ffi.string(native.name))
            )
            return 0

    monkeypatch.setattr(library, "lib", Calls())
    softnd._install(SOFTND)
    assert given == [(softnd.PROVIDER_ID.bytes_le, str(SOFTND), 0x20000, -1, softnd.NAME)]


def test_the_path_of_softnd_is_printed():
    if not SOFTND.exists():
        pytest.skip("softnd.dll is not built")
    done = command("softnd", "path")
    assert done.returncode == 0
    assert Path(done.stdout.strip()) == SOFTND


def is_wine() -> bool:
    import ctypes

    return hasattr(ctypes.windll.ntdll, "wine_get_version")


def test_wines_catalogue_cannot_be_changed_and_registering_says_so():
    """Wine's WSCInstallProvider answers with success and does nothing."""
    if not is_wine():
        pytest.skip("Windows' catalogue can be changed, and this test leaves it alone")
    done = command("softnd", "register", "--json")
    assert done.returncode == 1
    assert "NDPY_PROVIDER=" in json.loads(done.stdout)["error"]
    assert "was not registered" in command("softnd", "unregister").stdout


def test_a_registered_softnd_is_found_by_its_entry(tmp_path):
    """On a Windows machine of one's own: NDPY_TEST_REGISTER=1, as an administrator."""
    if not os.environ.get("NDPY_TEST_REGISTER"):
        pytest.skip("changes the machine's catalogue; NDPY_TEST_REGISTER=1 allows that")
    path = Path(shutil.copy(SOFTND, tmp_path))
    softnd.register(path)
    try:
        status, found = doctor()
        assert status == 0
        assert found[softnd.NAME]["verdict"] == "PASS"
        assert softnd.registered(1) is not None
    finally:
        softnd.unregister()
    assert softnd.registered() is softnd.registered(1) is None
