"""The place of softnd.dll, its entry in the Winsock catalogue, and the commands. Runs on any system."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from kit.winsock import TCP, fake_winsock

import ndpy
from ndpy.platforms.networkdirect import softnd_installation, winsock_catalogue
from ndpy.tools.cli import main


@pytest.fixture
def winsock(monkeypatch):
    monkeypatch.setattr(softnd_installation, "_require_windows", lambda: None)
    monkeypatch.setattr(softnd_installation, "_is_administrator", lambda: False)
    return fake_winsock(monkeypatch)


def test_softnds_entry_is_one_that_programs_find():
    made = softnd_installation.catalogue_entry()
    verdict = winsock_catalogue.judge(made)
    assert (verdict.version, verdict.families, verdict.problem) == (2, ("IPv4", "IPv6"), "")
    # Contract A.1.2 to A.1.6 and M.1, as numbers.
    assert (made.service_flags, made.provider_flags, made.version, made.address_family) == (0x8E, 0x14, 0x20000, 23)
    assert (made.socket_type, made.protocol, made.protocol_max_offset) == (-1, 0, 0)


def test_softnds_entry_of_version_1_is_one_that_programs_find():
    made = softnd_installation.catalogue_entry(1)
    verdict = winsock_catalogue.judge(made)
    assert (verdict.version, verdict.families, verdict.problem) == (1, ("IPv4", "IPv6"), "")
    assert made.version == 1
    assert made.provider_id != softnd_installation.catalogue_entry().provider_id
    # `netsh winsock show catalog` shows both. Their names tell them apart.
    assert (softnd_installation.catalogue_entry().name, made.name) == (
        softnd_installation.NAME,
        f"{softnd_installation.NAME}, version 1",
    )


def test_registering_adds_an_entry_for_each_version_and_again_changes_nothing(winsock, tmp_path):
    said: list[str] = []
    assert softnd_installation.register(tmp_path / "softnd.dll", said.append) is True
    assert softnd_installation.register(tmp_path / "softnd.dll", said.append) is False
    assert winsock.calls == ["install", "install"]
    assert winsock.entries == [TCP, softnd_installation.catalogue_entry(2), softnd_installation.catalogue_entry(1)]
    assert str(tmp_path / "softnd.dll") in said[0]
    assert "already" in said[-1]


def test_registering_adds_the_version_that_an_earlier_ndpy_left_out(winsock, tmp_path):
    softnd_installation._install(tmp_path / "softnd.dll")
    assert softnd_installation.register(tmp_path / "softnd.dll") is True
    assert winsock.calls == ["install", "install"]
    assert {entry.version for entry in winsock_catalogue.entries()} == {1, 2}


def test_registering_another_path_replaces_the_entries(winsock, tmp_path):
    softnd_installation.register(tmp_path / "old.dll")
    winsock.calls.clear()
    said: list[str] = []
    softnd_installation.register(tmp_path / "new.dll", said.append)
    assert winsock.calls == ["deinstall", "install"] * 2
    assert {entry.path for entry in winsock_catalogue.entries()} == {str(tmp_path / "new.dll")}
    for version, line in ((2, said[0]), (1, said[2])):
        assert f"removing the entry of version {version} for {tmp_path / 'old.dll'}" in line


def test_an_entry_that_has_lost_its_path_is_made_anew(winsock, tmp_path):
    softnd_installation.register(tmp_path / "softnd.dll")
    del winsock.paths[softnd_installation.PROVIDER_ID.bytes_le]
    assert softnd_installation.register(tmp_path / "softnd.dll") is True
    assert softnd_installation.registered().path == str(tmp_path / "softnd.dll")


def test_the_entry_that_is_asked_for_is_that_of_version_2_unless_told(winsock, tmp_path):
    assert softnd_installation.registered() is None
    softnd_installation.register(tmp_path / "softnd.dll")
    assert (
        softnd_installation.registered().version,
        softnd_installation.registered(2).version,
        softnd_installation.registered(1).version,
    ) == (2, 2, 1)


def test_unregistering_removes_the_entries_and_again_changes_nothing(winsock, tmp_path):
    softnd_installation.register(tmp_path / "softnd.dll")
    said: list[str] = []
    assert softnd_installation.unregister(said.append) is True
    assert len(said) == 3
    assert all(str(tmp_path / "softnd.dll") in line for line in said[:2])
    assert said.pop() == "done"
    assert softnd_installation.unregister(said.append) is False
    assert "no entry" in said[-1]
    assert winsock.entries == [TCP]


def test_an_entry_that_stays_is_an_error(winsock, tmp_path):
    softnd_installation.register(tmp_path / "softnd.dll")
    winsock.forgets = True
    with pytest.raises(ndpy.ProviderError, match="still shows the entry") as caught:
        softnd_installation.unregister()
    assert caught.value.operation == "WSCDeinstallProvider"


@pytest.mark.parametrize("number", [5, 740, 10013, 11003])
def test_who_is_no_administrator_is_told_so_with_the_number(winsock, tmp_path, number):
    winsock.error = number
    with pytest.raises(ndpy.errors.PermissionError) as caught:
        softnd_installation.register(tmp_path / "softnd.dll")
    assert "administrator" in str(caught.value)
    assert caught.value.native == number
    assert isinstance(caught.value, PermissionError)


@pytest.mark.parametrize(("number", "administrator"), [(10014, False), (11003, True)])
def test_another_refusal_keeps_its_number(number, administrator):
    error = softnd_installation.change_error("WSCInstallProvider", number, administrator=administrator)
    assert not isinstance(error, PermissionError)
    assert error.native == number


def test_an_entry_that_does_not_appear_is_an_error_that_names_the_other_way(winsock, tmp_path):
    winsock.forgets = True
    with pytest.raises(ndpy.ProviderError, match="NDPY_PROVIDER="):
        softnd_installation.register(tmp_path / "softnd.dll")


def test_without_windows_there_is_no_catalogue_to_change(tmp_path):
    if sys.platform == "win32":
        pytest.skip("this is Windows")
    with pytest.raises(ndpy.UnsupportedError):
        softnd_installation.register(tmp_path / "softnd.dll")


def layout(tmp_path: Path, *files: str) -> Path:
    for name in ("ndpy/__init__.py", *files):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path / "ndpy"


def test_the_dll_in_a_wheel_is_in_the_package(tmp_path):
    package = layout(tmp_path, "ndpy/networkdirect/softnd.dll")
    assert softnd_installation.find(package) == package / "networkdirect/softnd.dll"


def test_the_dll_in_a_checkout_is_what_make_softnd_builds(tmp_path):
    package = layout(tmp_path, "softrdma/Makefile", "softrdma/build/softnd.dll")
    assert softnd_installation.find(package) == tmp_path / "softrdma/build/softnd.dll"


def test_a_checkout_without_the_dll_says_make_softnd(tmp_path):
    with pytest.raises(ndpy.ProviderNotFoundError, match="is not built: run `make softnd`") as caught:
        softnd_installation.find(layout(tmp_path, "softrdma/Makefile"))
    assert str(tmp_path) in str(caught.value)


def test_an_installation_without_the_dll_says_where_it_is(tmp_path):
    with pytest.raises(ndpy.ProviderNotFoundError, match="wheel for Windows"):
        softnd_installation.find(layout(tmp_path))


def invoke(*words: str):
    return CliRunner().invoke(main, ["softnd", *words])


def test_the_command_prints_the_path(monkeypatch, tmp_path):
    monkeypatch.setattr(softnd_installation, "find", lambda: tmp_path / "softnd.dll")
    assert invoke("path").stdout == f"{tmp_path / 'softnd.dll'}\n"
    assert json.loads(invoke("path", "--json").stdout) == {"path": str(tmp_path / "softnd.dll")}


def test_the_commands_register_and_unregister(winsock, tmp_path):
    (tmp_path / "softnd.dll").touch()
    result = invoke("register", "--dll", str(tmp_path / "softnd.dll"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["changed"] is True
    assert "adding an entry" in result.stderr
    assert "was registered already" in invoke("register", "--dll", str(tmp_path / "softnd.dll")).stdout
    assert invoke("unregister").stdout == "removed\n"
    assert invoke("unregister").stdout == "was not registered\n"


def test_a_refusal_ends_the_command_with_status_1_and_json_all_the_same(winsock, tmp_path):
    (tmp_path / "softnd.dll").touch()
    winsock.error = 10013
    result = invoke("register", "--dll", str(tmp_path / "softnd.dll"), "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["native"] == 10013
    assert "administrator" in result.stderr
