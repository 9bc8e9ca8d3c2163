"""Which provider is loaded, the errors for an unusable one, and when a provider is unloaded.

`make -C tests/networkdirect/providers` builds the DLLs. Each except softnd is named after its defect.
"""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import struct
import uuid
from collections import namedtuple
from ctypes import wintypes
from pathlib import Path

import pytest
from kit.helpers import DEADLINE_S, wait_until
from kit.threads import in_threads
from own_softnd import child

import ndpy
from ndpy.platforms.networkdirect import adapter_info, interfaces, winsock_catalogue
from ndpy.platforms.networkdirect.provider_dll import Provider

ROOT = Path(__file__).resolve().parent.parent.parent
SOFTND = ROOT / "softrdma/build/softnd.dll"
PROVIDERS = ROOT / "softrdma/build/providers"

kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)
kernel32.GetModuleHandleW.restype = wintypes.HMODULE
kernel32.GetModuleHandleW.argtypes = [wintypes.LPCWSTR]


def mapped(path: Path) -> bool:
    """Whether this process has loaded this DLL."""
    return kernel32.GetModuleHandleW(str(path)) is not None


@pytest.fixture
def copy_of(tmp_path):
    """copy_of(name): a copy of a provider at a new path, so that only this test uses its DLL."""

    def copy(name: str, stem: str = "") -> Path:
        source = SOFTND if name == "softnd" else PROVIDERS / f"{name}.dll"
        assert source.exists(), "run: make -C tests/networkdirect/providers"
        return Path(shutil.copy(source, tmp_path / f"{stem or tmp_path.name + name}.dll"))

    return copy


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    monkeypatch.delenv("NDPY_PROVIDER_VERSION", raising=False)
    monkeypatch.delenv("SOFTND_ADDRESSES", raising=False)


def ways_to_open(path: Path, monkeypatch):
    """The two ways to name a DLL."""

    def by_environment():
        monkeypatch.setenv("NDPY_PROVIDER", str(path))
        ndpy.open_adapter().close()

    def by_argument():
        monkeypatch.delenv("NDPY_PROVIDER", raising=False)
        ndpy.open_adapter(provider=path).close()

    return by_environment, by_argument


REFUSED = {
    "NO_EXPORTS": (ndpy.ProviderNotFoundError, ["DllGetClassObject"], None),
    "ONE_EXPORT": (ndpy.ProviderNotFoundError, ["DllCanUnloadNow"], None),
    "VERSION_1_NO_PROVIDER": (ndpy.UnsupportedError, ["no INDProvider", "E_NOINTERFACE"], 0x80004002),
    "VERSION_1_NULL_PROVIDER": (ndpy.ProviderError, ["no INDProvider"], 0),
    "VERSION_1_NO_OPEN": (ndpy.AddressUnreachableError, ["0xc0000141", "ND_INVALID_ADDRESS"], 0xC0000141),
    "VERSION_1_OPEN_NULL": (ndpy.ProviderError, ["no INDAdapter"], 0),
    "VERSION_1_NO_QUERY": (ndpy.ProviderError, ["0xc00000a3"], 0xC00000A3),
    "VERSION_1_NO_FILE": (ndpy.ProviderError, ["no file"], 0),
    "NO_INTERFACE": (ndpy.UnsupportedError, ["0x80004002", "E_NOINTERFACE"], 0x80004002),
    "UNKNOWN_STATUS": (ndpy.ProviderError, ["0xc0abcdef"], 0xC0ABCDEF),
    "NULL_OBJECT": (ndpy.ProviderError, ["no IND2Provider"], 0),
    "NO_ADDRESS": (ndpy.AdapterNotFoundError, ["serves no address"], None),
    "NO_OPEN": (ndpy.ProviderError, ["0xc00000a3", "ND_DEVICE_NOT_READY"], 0xC00000A3),
    "OPEN_UNKNOWN": (ndpy.ProviderError, ["0xc0abcdef"], 0xC0ABCDEF),
    "OPEN_NULL": (ndpy.ProviderError, ["no IND2Adapter"], 0),
    "NO_QUERY": (ndpy.ProviderError, ["0xc00000a3"], 0xC00000A3),
    "NO_FILE": (ndpy.InsufficientResourcesError, ["0xc0000017", "ND_NO_MEMORY"], 0xC0000017),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_provider_is_said_with_its_name_and_the_number(name, copy_of, monkeypatch):
    kind, words, number = REFUSED[name]
    path = copy_of(name)
    for attempt in ways_to_open(path, monkeypatch):
        with pytest.raises(ndpy.NdpyError) as caught:
            attempt()
        assert type(caught.value) is kind
        for word in (str(path), *words):
            assert word in str(caught.value)
        if number is not None:
            assert caught.value.native == number


def header_of_a_dll(machine: int) -> bytes:
    return (b"MZ" + bytes(58) + struct.pack("<I", 64)) + b"PE\0\0" + struct.pack("<H", machine) + bytes(64)


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        pytest.param(None, r"does not exist", id="absent"),
        pytest.param(b"no DLL", r"cannot be loaded: it is not a DLL", id="no DLL"),
        pytest.param(header_of_a_dll(0x14C), r"x86.*x64", id="of the wrong bitness"),
        pytest.param(header_of_a_dll(0x8664), r"load provider.*cannot be loaded", id="ends after its header"),
    ],
)
def test_what_is_no_provider_is_named(tmp_path, monkeypatch, contents, said):
    path = tmp_path / "some.dll"
    if contents is not None:
        path.write_bytes(contents)
    for attempt in ways_to_open(path, monkeypatch):
        with pytest.raises(ndpy.ProviderNotFoundError, match=said) as caught:
            attempt()
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("version", [2, 1])
def test_a_5_1_an_address_list_that_is_refused_is_said_with_the_providers_name(copy_of, native, version):
    path = copy_of("softnd")
    native.answer("IND2Provider_QueryAddressList" if version == 2 else "INDProvider_QueryAddressList", 0xC00000A3)
    with pytest.raises(ndpy.ProviderError, match="ND_DEVICE_NOT_READY") as caught:
        ndpy.list_adapters(provider=path, version=version)
    assert str(path) in str(caught.value)
    assert caught.value.native == 0xC00000A3


def test_b_7_2_a_provider_whose_structure_is_larger_is_asked_again(copy_of, native):
    query, asked = native.IND2Adapter_Query, []

    def larger(adapter, info, size):
        asked.append((info.info_version, size[0]))
        if size[0] < 200:
            size[0] = 200
            return 0x80000005 - (1 << 32)
        return query(adapter, info, size)

    path = copy_of("softnd")
    wanted = ndpy.list_adapters(provider=path, version=2)
    native.IND2Adapter_Query = larger
    assert ndpy.list_adapters(provider=path, version=2) == wanted
    assert asked == [(0x20000, 96), (0x20000, 200)]
    native.IND2Adapter_Query = lambda adapter, info, size: larger(adapter, info, size) and -0x3FFFFF5D
    with pytest.raises(ndpy.ProviderError) as caught:
        ndpy.list_adapters(provider=path, version=2)
    assert caught.value.native == 0xC00000A3


@pytest.mark.parametrize(
    ("statistics", "wanted"),
    [
        ({"wire": (False, 1500)}, ("wire", 1500, False)),
        ({"wire": (True, 9000)}, ("wire", 9000, True)),
        ({}, ("wire", 0, True)),
    ],
)
def test_an_adapter_is_as_its_interface_is(monkeypatch, statistics, wanted):
    """If Windows reports no state for an interface, it counts as up."""
    own = {"loopback": ["127.0.0.1"], "radio": ["00-11-22", "192.0.2.7"], "wire": ["fe80::9%3", "192.0.2.9"]}
    address, state = namedtuple("address", "address"), namedtuple("state", "isup mtu")
    monkeypatch.setattr(
        interfaces.psutil, "net_if_addrs", lambda: {name: list(map(address, own[name])) for name in own}
    )
    monkeypatch.setattr(
        interfaces.psutil, "net_if_stats", lambda: {name: state(*statistics[name]) for name in statistics}
    )
    assert adapter_info._interface_of(("192.0.2.9",)) == wanted
    assert adapter_info._interface_of(("fe80::9%11",)) == wanted
    # Every machine has this address, so it names no interface.
    assert adapter_info._interface_of(("127.0.0.1",)) == (None, 0, True)
    assert adapter_info._interface_of(("198.51.100.1",)) == (None, 0, True)


def test_several_providers_may_be_named(copy_of, monkeypatch):
    first, second = copy_of("UNLOADS", "first"), copy_of("UNLOADS", "Second")
    monkeypatch.setenv("NDPY_PROVIDER", os.pathsep.join(("", str(first), str(second))))
    found = ndpy.list_adapters()
    assert [info.name for info in found] == ["first0", "first1", "second0", "second1"]
    assert [info.provider_path for info in found] == [str(first)] * 2 + [str(second)] * 2
    assert [info.adapter_id for info in found] == [7, 8, 7, 8]
    with ndpy.open_adapter("second1") as adapter:
        assert (adapter.info.provider_path, adapter.info.adapter_id) == (str(second), 8)
        assert mapped(second)
        assert not mapped(first)


def test_two_dlls_of_one_name_have_adapters_of_different_names(copy_of, tmp_path, monkeypatch):
    other = tmp_path / "other"
    other.mkdir()
    first = copy_of("UNLOADS", "same")
    second = Path(shutil.copy(first, other))
    monkeypatch.setenv("NDPY_PROVIDER", os.pathsep.join((str(first), str(second))))
    assert [info.name for info in ndpy.list_adapters()] == ["same0", "same1", "same2", "same3"]
    with ndpy.open_adapter("same2") as adapter:
        assert adapter.info.provider_path == str(second)


def test_a_named_provider_that_fails_is_not_passed_over(copy_of, monkeypatch):
    broken = copy_of("NO_INTERFACE")
    monkeypatch.setenv("NDPY_PROVIDER", os.pathsep.join((str(copy_of("UNLOADS")), str(broken))))
    with pytest.raises(ndpy.UnsupportedError) as caught:
        ndpy.list_adapters()
    assert str(broken) in str(caught.value)


def test_the_argument_outranks_the_environment(copy_of, monkeypatch):
    monkeypatch.setenv("NDPY_PROVIDER", str(copy_of("NO_INTERFACE")))
    path = copy_of("UNLOADS", "chosen")
    assert [info.name for info in ndpy.list_adapters(provider=path)] == ["chosen0", "chosen1"]
    with ndpy.open_adapter("chosen1", provider=str(path)) as adapter:
        assert adapter.info.adapter_id == 8
    with pytest.raises(ndpy.AdapterNotFoundError, match="chosen0"):
        ndpy.open_adapter("chosen2", provider=path)


def test_a_5_each_address_opens_its_adapter(copy_of):
    path = copy_of("UNLOADS")
    for address, number in (("127.0.0.1", 7), ("::1", 7), ("127.0.0.2", 8), ("0:0::1", 7)):
        with ndpy.open_adapter(address, provider=path) as adapter:
            assert adapter.info.adapter_id == number
    with pytest.raises(ndpy.AdapterNotFoundError, match=r"127\.0\.0\.3"):
        ndpy.open_adapter("127.0.0.3", provider=path)


def test_a_6_4_all_addresses_of_softnd_open_the_same_adapter(copy_of):
    path = copy_of("softnd")
    (info,) = ndpy.list_adapters(provider=path)
    assert {"127.0.0.1", "::1"} <= set(info.addresses)
    for address in info.addresses:
        with ndpy.open_adapter(address, provider=path) as adapter:
            assert adapter.info.name == info.name
            assert adapter.info.adapter_id == info.adapter_id


# ---- unloading ----


def test_a_4_1_a_provider_that_can_be_unloaded_is_gone_after_the_last_close(copy_of):
    path = copy_of("UNLOADS")
    assert not mapped(path)
    first = ndpy.open_adapter("127.0.0.1", provider=path)
    second = ndpy.open_adapter("127.0.0.2", provider=path)
    first.close()
    assert mapped(path)
    second.close()
    assert not mapped(path)
    assert str(path) not in Provider._loaded
    # It can be loaded again.
    with ndpy.open_adapter(provider=path):
        assert mapped(path)
    assert not mapped(path)


def test_a_4_1_a_provider_that_has_to_stay_is_kept_and_used_again(copy_of):
    path = copy_of("KEEPS")
    for _ in range(3):
        with ndpy.open_adapter(provider=path):
            assert mapped(path)
        assert mapped(path)
    assert Provider._loaded[str(path)]._users == 0


def test_listing_leaves_no_provider_behind(copy_of):
    path = copy_of("UNLOADS")
    assert len(ndpy.list_adapters(provider=path)) == 2
    assert not mapped(path)


@pytest.mark.parametrize("version", [2, 1])
def test_a_4_2_listing_holds_no_object_of_the_provider(copy_of, version):
    """softnd says that it can be unloaded only when nobody refers to its objects."""
    path = copy_of("softnd")

    def listed_without_a_trace() -> bool:
        assert ndpy.list_adapters(provider=path, version=version)
        return not mapped(path)

    wait_until(listed_without_a_trace, "softnd says that it can be unloaded", DEADLINE_S)


@pytest.mark.parametrize("name", ["NO_FILE", "NO_QUERY", "NO_OPEN", "OPEN_NULL", "NULL_OBJECT"])
def test_an_open_that_failed_leaves_no_user(name, copy_of):
    path = copy_of(name)
    with pytest.raises(ndpy.ProviderError):
        ndpy.open_adapter(provider=path)
    gc.collect()
    assert Provider._loaded[str(path)]._users == 0


def test_an_adapter_that_was_dropped_unloads_its_provider(copy_of):
    path = copy_of("UNLOADS")
    adapter = ndpy.open_adapter(provider=path)
    with pytest.warns(ResourceWarning, match="unclosed"):
        del adapter
        gc.collect()
    wait_until(lambda: not mapped(path), "the provider is unloaded")


def test_a_4_3_softnd_is_unloaded_when_its_threads_have_ended(copy_of):
    path = copy_of("softnd")

    def opened_and_closed_without_a_trace() -> bool:
        with ndpy.open_adapter("127.0.0.1", provider=path) as adapter:
            adapter.register(bytearray(4096)).close()
        return not mapped(path)

    wait_until(opened_and_closed_without_a_trace, "softnd says that it can be unloaded", DEADLINE_S)


def test_many_threads_load_and_unload_one_provider(copy_of):
    path = copy_of("UNLOADS")

    def work(_) -> None:
        for _ in range(20):
            with ndpy.open_adapter("127.0.0.2", provider=path) as adapter:
                assert adapter.info.adapter_id == 8

    in_threads(4, work, 3 * DEADLINE_S)
    assert not mapped(path)


# ---- version 1 ----


def registered(monkeypatch, *entries: tuple[Path, int]) -> None:
    """Make the catalogue contain these DLLs, each registered for a version. Wine's catalogue cannot be changed."""
    monkeypatch.delenv("NDPY_PROVIDER", raising=False)
    found = [
        winsock_catalogue.Entry(
            f"{path.stem} {version}", uuid.uuid4().bytes_le, version, ("IPv4", "IPv6"), str(path), ""
        )
        for path, version in entries
    ]
    monkeypatch.setattr(winsock_catalogue, "entries", lambda: list(found))


def seen(infos) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(info.name, info.version, info.addresses) for info in infos]


def test_a_3_2_a_dll_of_version_1_only_has_an_adapter_at_each_address(copy_of, monkeypatch):
    path = copy_of("VERSION_1", "old")
    wanted = [("old0", 1, ("127.0.0.1",)), ("old1", 1, ("127.0.0.2",)), ("old2", 1, ("::1",))]
    assert seen(ndpy.list_adapters(provider=path)) == seen(ndpy.list_adapters(provider=path, version=1)) == wanted
    monkeypatch.setenv("NDPY_PROVIDER", str(path))
    assert seen(ndpy.list_adapters()) == wanted
    with ndpy.open_adapter("127.0.0.2") as adapter:
        assert (adapter.info.name, adapter.info.version) == ("old1", 1)
        # The provider's structure is larger than ND_ADAPTER_INFO1 (B.7.2). It has 64 in every field.
        assert adapter.info.max_registration_size == adapter.info.max_callee_data == 64
        assert (adapter.info.max_inline_data_size, adapter.info.max_shared_receive_queue_depth) == (0, 0)
        assert ndpy.Capability.REGION_ACCESS not in adapter.info.capabilities
        assert mapped(path)
    assert not mapped(path)
    with pytest.raises(ndpy.UnsupportedError, match="version 1 only") as caught:
        ndpy.open_adapter(provider=path, version=2)
    assert (str(path) in str(caught.value), caught.value.native) == (True, 0x80004002)


def test_a_3_1_a_dll_of_version_2_only_is_not_used_as_version_1(copy_of, monkeypatch):
    path = copy_of("UNLOADS")
    assert [info.version for info in ndpy.list_adapters(provider=path)] == [2, 2]
    with pytest.raises(ndpy.UnsupportedError, match="version 2 only") as caught:
        ndpy.open_adapter(provider=path, version=1)
    assert str(path) in str(caught.value)
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", "1")
    with pytest.raises(ndpy.UnsupportedError, match="version 2 only"):
        ndpy.list_adapters(provider=path)


def test_a_3_3_a_dll_of_both_versions_is_used_as_version_2_unless_asked(copy_of, monkeypatch):
    path = copy_of("softnd")
    for asked, environment, used in ((None, "", 2), (None, "1", 1), (2, "1", 2), (1, "", 1), (1, "2", 1)):
        monkeypatch.setenv("NDPY_PROVIDER_VERSION", environment)
        with ndpy.open_adapter("127.0.0.1", provider=path, version=asked) as adapter:
            assert adapter.info.version == used
            assert (ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities) == (used == 2)
            assert (ndpy.Capability.SEND_INVALIDATE in adapter.info.capabilities) == (used == 1)
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", "")
    two, one = ndpy.list_adapters(provider=path, version=2), ndpy.list_adapters(provider=path, version=1)
    assert sorted(address for info in one for address in info.addresses) == sorted(two[0].addresses)


def test_a_version_that_there_is_not_is_refused(copy_of, monkeypatch):
    path = copy_of("UNLOADS")
    with pytest.raises(ValueError, match="1 and 2"):
        ndpy.open_adapter(provider=path, version=3)
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", "two")
    with pytest.raises(ndpy.ProviderNotFoundError, match="NDPY_PROVIDER_VERSION is 'two'"):
        ndpy.open_adapter(provider=path)


def test_a_1_3_the_catalogue_says_which_version_an_entry_is_of(copy_of, monkeypatch):
    two, one, both = copy_of("UNLOADS", "two"), copy_of("VERSION_1", "one"), copy_of("softnd", "both")
    # Stale entries: neither DLL serves the version that it is registered for.
    registered(monkeypatch, (one, 2), (two, 1))
    assert ndpy.list_adapters() == []
    registered(monkeypatch, (one, 1))
    assert [info.name for info in ndpy.list_adapters()] == ["one0", "one1", "one2"]
    registered(monkeypatch, (both, 1))
    assert {info.version for info in ndpy.list_adapters()} == {1}
    registered(monkeypatch, (both, 1), (both, 2))
    assert [info.version for info in ndpy.list_adapters()] == [2]
    assert {info.version for info in ndpy.list_adapters(version=1)} == {1}


def test_a_7_2_version_1_serves_the_addresses_that_version_2_does_not(copy_of, monkeypatch):
    two, both = copy_of("UNLOADS", "two"), copy_of("softnd", "both")
    registered(monkeypatch, (both, 1), (two, 2))
    found = ndpy.list_adapters()
    served = {"127.0.0.1", "127.0.0.2", "::1"}
    assert [info.name for info in found[:2]] == ["two0", "two1"]
    assert all(info.version == 1 and served.isdisjoint(info.addresses) for info in found[2:])
    assert ndpy.open_adapter("127.0.0.1").info.version == 2
    monkeypatch.setenv("NDPY_PROVIDER_VERSION", "1")
    assert {info.version for info in ndpy.list_adapters()} == {1}
    with ndpy.open_adapter("127.0.0.1") as adapter:
        assert (adapter.info.driver, adapter.info.version) == ("both.dll", 1)


def test_a_1_4_an_entry_of_version_1_without_the_flag_is_found(copy_of, monkeypatch):
    """Socket type and flags exclude Winsock's own hidden entries. Any other entry must be able to open an adapter."""
    path = copy_of("VERSION_1", "old")
    common = {"protocol": 0, "protocol_max_offset": 0, "address_family": 23}
    protocols = [
        winsock_catalogue.WinsockProtocol(
            name=name, provider_id=uuid.uuid4().bytes_le, service_flags=services, provider_flags=0x04, version=version,
            socket_type=socket_type, **common,
        )
        for name, services, version, socket_type in (
            ("old adapter", 0x8E, 1, -1),
            ("version 2 needs the flag", 0x8E, 0x20000, -1),
            ("a stream socket", 0x8E, 1, 1),
            ("no message boundaries", 0x86, 1, -1),
        )
    ]  # fmt: skip
    monkeypatch.delenv("NDPY_PROVIDER", raising=False)
    monkeypatch.setattr(winsock_catalogue, "protocols", lambda: protocols)
    monkeypatch.setattr(winsock_catalogue, "provider_path", lambda provider_id: (str(path), ""))
    assert [entry.name for entry in winsock_catalogue.entries() if not entry.problem] == ["old adapter"]
    assert [info.name for info in ndpy.list_adapters()] == ["old0", "old1", "old2"]


def test_an_entry_of_version_1_that_opens_nothing_is_passed_over(copy_of, monkeypatch):
    registered(
        monkeypatch,
        *((copy_of(name, name), 1) for name in ("NO_EXPORTS", "VERSION_1_NO_PROVIDER", "VERSION_1_NO_OPEN")),
        (copy_of("VERSION_1", "old"), 1),
    )
    assert [info.name for info in ndpy.list_adapters()] == ["old0", "old1", "old2"]


def test_devices_shows_the_version(copy_of):
    path = str(copy_of("softnd"))
    for version in ("1", "2"):
        done = child(
            "from ndpy.tools.cli import main; main(['devices'])", NDPY_PROVIDER=path, NDPY_PROVIDER_VERSION=version
        )
        assert done.returncode == 0, done.stderr
        assert f"NetworkDirect {version}" in done.stdout
