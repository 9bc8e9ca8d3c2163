"""Adapters: how they are found, opened, described and closed."""

from __future__ import annotations

import gc
import ipaddress
import json
import sys
import warnings
from pathlib import Path

import pytest
from kit.helpers import assert_works, connect_pair, create_end, host_of, memory, require
from kit.quirks import has_quirk

import ndpy
from ndpy import Capability
from ndpy.vocabulary.counters import changes
from ndpy.vocabulary.quirks import Quirk


def test_the_adapter_is_listed(adapter, adapter_name):
    listed = {info.name: info for info in ndpy.list_adapters()}
    assert adapter_name in listed
    assert listed[adapter_name] == adapter.info


def test_an_adapter_opens_by_name_and_by_each_address(adapter, adapter_name):
    assert adapter.info.addresses
    for which in (adapter_name, *adapter.info.addresses):
        with ndpy.open_adapter(which) as opened:
            assert opened.info.name == adapter_name


def test_ndpy_adapter_chooses_the_default(monkeypatch, adapter_name):
    monkeypatch.setenv("NDPY_ADAPTER", adapter_name)
    with ndpy.open_adapter() as opened:
        assert opened.info.name == adapter_name


def test_without_a_choice_the_first_active_adapter_opens(monkeypatch, adapter):
    if adapter.info.driver == "softverbs":
        pytest.skip("soft0 is taken only by name")
    monkeypatch.delenv("NDPY_ADAPTER", raising=False)
    first = next(info.name for info in ndpy.list_adapters() if info.state == "active")
    with ndpy.open_adapter() as opened:
        assert opened.info.name == first


@pytest.mark.parametrize("which", ["nonesuch9", "203.0.113.77", "2001:db8:ffff::1"])
def test_an_absent_adapter_is_an_error_that_says_what_there_is(adapter_name, which):
    with pytest.raises(ndpy.AdapterNotFoundError) as raised:
        ndpy.open_adapter(which)
    assert which in str(raised.value)
    assert adapter_name in str(raised.value)
    assert isinstance(raised.value, LookupError)


def test_info_has_identity_limits_and_capabilities(adapter):
    info = adapter.info
    assert info.state == "active"
    assert info.provider in {"verbs", "networkdirect"}
    assert info.transport in {"InfiniBand", "RoCE", "iWARP", "NetworkDirect"}
    assert isinstance(info.capabilities, ndpy.Capability)
    for address in info.addresses:
        ipaddress.ip_address(address.partition("%")[0])
    for name in (
        "max_registration_size",
        "max_initiator_sge",
        "max_receive_sge",
        "max_read_sge",
        "max_transfer_length",
        "max_inbound_read_limit",
        "max_outbound_read_limit",
        "max_receive_queue_depth",
        "max_initiator_queue_depth",
        "max_completion_queue_depth",
        "max_caller_data",
        "max_callee_data",
        "mtu",
    ):
        assert getattr(info, name) > 0, name
    for name in ("max_inline_data_size", "max_window_size", "max_shared_receive_queue_depth"):
        assert getattr(info, name) >= 0, name
    assert (info.max_window_size > 0) == (ndpy.Capability.MEMORY_WINDOWS in info.capabilities)
    assert (info.max_inline_data_size > 0) == (ndpy.Capability.INLINE in info.capabilities)
    assert info.numa_node is None or info.numa_node >= 0


def test_private_data_room_is_what_the_connection_managers_have(adapter):
    """The expected numbers come from the standards of the connection managers.

    InfiniBand: a request has 92 bytes, and the IP addressing annex takes 36 of them. A rejection has 148 bytes. A reply
    has 196, but one limit covers both (H.6.3).
    iWARP: RFC 5044 allows 512 bytes. Implementations allow fewer.
    NetworkDirect does not say which transport it uses.
    """
    info = adapter.info
    if info.transport in ("iWARP", "NetworkDirect"):
        assert 56 <= info.max_caller_data <= 512
        assert 56 <= info.max_callee_data <= 512
    else:
        assert (info.max_caller_data, info.max_callee_data) == (56, 148)


def test_ports_and_their_gids(adapter):
    require(adapter, ndpy.Capability.GIDS)
    info = adapter.info
    assert [port.number for port in info.ports] == list(range(1, len(info.ports) + 1))
    for port in info.ports:
        assert port.mtu <= port.max_mtu
        assert port.mtu in (256, 512, 1024, 2048, 4096) or has_quirk(adapter, Quirk.IWARP_NO_PATH_MTU)
        assert len({gid.index for gid in port.gids}) == len(port.gids)
        for gid in port.gids:
            assert len(gid.value) == 16
            assert gid.type in {"RoCE v2", "RoCE v1", "InfiniBand", "IB", "iWARP"}


def test_ports_tell_their_pkeys(adapter):
    """On InfiniBand and RoCE every port has one at least, and the default one is full membership."""
    for port in adapter.info.ports:
        if adapter.info.transport in ("InfiniBand", "RoCE"):
            assert port.pkeys
        assert all(0 <= pkey <= 0xFFFF for pkey in port.pkeys)
        assert not port.pkeys or port.pkeys[-1]


def test_ports_tell_their_speed(adapter):
    """Linux's kernel has it in a file too."""
    for port in adapter.info.ports:
        rate = Path(f"/sys/class/infiniband/{adapter.info.name}/ports/{port.number}/rate")
        if rate.exists():
            assert port.speed_gbps == float(rate.read_text().split()[0])
        assert port.speed_gbps is None or port.speed_gbps > 0


def test_info_becomes_json(adapter):
    values = json.loads(json.dumps(adapter.info.to_dict()))
    assert values["name"] == adapter.info.name
    assert {ndpy.Capability[name] for name in values["capabilities"]} == {
        capability
        for capability in ndpy.Capability.__members__.values()
        if capability and capability in adapter.info.capabilities
    }


def test_info_cannot_be_changed(adapter):
    with pytest.raises(AttributeError):
        adapter.info.name = "other"  # type: ignore[misc]


# ---- lifetime ----


def test_closing_twice_is_harmless(adapter_name):
    adapter = ndpy.open_adapter(adapter_name)
    assert not adapter.closed
    adapter.close()
    adapter.close()
    assert adapter.closed


def test_an_adapter_with_open_children_refuses_to_close_and_names_them(adapter, keep):
    region = memory(keep, adapter, 64)
    cq = keep(adapter.create_completion_queue(8))
    with pytest.raises(ndpy.DeviceBusyError) as refused:
        adapter.close()
    assert "MemoryRegion" in str(refused.value)
    assert "CompletionQueue" in str(refused.value)
    assert not adapter.closed
    region.close()
    assert cq.poll() == []


def test_nothing_works_on_a_closed_adapter(adapter_name):
    adapter = ndpy.open_adapter(adapter_name)
    adapter.close()
    assert adapter.info.name == adapter_name
    for use in (
        lambda: adapter.register(bytearray(8)),
        lambda: adapter.begin_register(bytearray(8)),
        lambda: adapter.create_completion_queue(8),
        lambda: adapter.create_connector(),
        lambda: adapter.create_memory_window(),
        lambda: adapter.create_shared_receive_queue(8),
        lambda: adapter.listen(("", 0)),
        lambda: adapter.__enter__(),
    ):
        with pytest.raises(ndpy.ClosedError):
            use()


def test_adapters_opened_twice_do_not_meet(adapter, keep, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    assert other.info == adapter.info
    region = memory(keep, adapter, 8)
    other.close()
    assert region.length == 8


def test_a_with_block_of_everything_closes_in_order(adapter_name):
    with (
        ndpy.open_adapter(adapter_name) as adapter,
        adapter.register(bytearray(64)) as region,
        adapter.create_completion_queue(8) as cq,
        adapter.create_queue_pair(cq) as queue_pair,
    ):
        queue_pair.receive(region)
    assert adapter.closed
    assert region.closed
    assert cq.closed
    assert queue_pair.closed


def test_the_exception_of_a_with_block_wins(adapter_name):
    """Open children must not hide an error that was raised inside the block."""
    with pytest.raises(KeyError, match="the reason"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        with ndpy.open_adapter(adapter_name) as adapter:
            queue = adapter.create_completion_queue(8)
            raise KeyError("the reason")
    assert not adapter.closed
    queue.close()
    adapter.close()


def test_a_with_block_that_leaves_something_open_says_so(adapter_name):
    with pytest.raises(ndpy.DeviceBusyError, match="CompletionQueue"), ndpy.open_adapter(adapter_name) as adapter:
        queue = adapter.create_completion_queue(8)
    queue.close()
    adapter.close()


def test_everything_names_the_adapter_that_it_was_made_from(adapter, keep):
    end = create_end(keep, adapter)
    made = [end.queue_pair, end.cq, keep(adapter.create_connector()), keep(adapter.register(bytearray(8)))]
    made.append(keep(adapter.listen((host_of(adapter), 0))))
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        made.append(keep(adapter.create_memory_window()))
    if ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
        made.append(keep(adapter.create_shared_receive_queue(8)))
    for thing in made:
        assert thing.adapter is adapter, thing


def test_what_was_dropped_warns_and_is_released(adapter):
    with pytest.warns(ResourceWarning, match="MemoryRegion"):
        adapter.register(bytearray(64))
        gc.collect()
    with pytest.warns(ResourceWarning, match="CompletionQueue"):
        adapter.create_completion_queue(8)
        gc.collect()
    # Closing the adapter at the end of this test fails if one of them is still open.


def test_connect_makes_a_connection_in_one_call(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    requested = listener.begin_get_request()
    accepted = []
    requested.add_done_callback(lambda done: accepted.append(keep(done.result(0)).begin_accept(server.queue_pair)))
    connector = keep(adapter.connect(client.queue_pair, listener.address, private_data=b"hello", timeout_s=20))
    accepted[0].result(20)
    assert connector.state == "established"
    assert client.queue_pair.connector is connector
    server.queue_pair.receive([], context=1)
    client.queue_pair.send([])
    assert server.cq.wait(20)[0].context == 1


def test_many_connections_of_one_adapter(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    for pair in [connect_pair(keep, adapter) for _ in range(4)]:
        assert_works(keep, pair)


def test_what_only_the_other_system_has_is_unsupported(adapter):
    lacks = ["port_state"] if sys.platform == "win32" else ["completion_port", "overlapped_file"]
    for name in lacks:
        with pytest.raises(ndpy.UnsupportedError) as caught:
            getattr(adapter, name)
        assert caught.value.operation == name
    if sys.platform == "linux":
        with pytest.raises(ndpy.UnsupportedError, match="overlapped file"):
            adapter.create_completion_queue(8, overlapped_file=3)


def test_counters_count_what_is_sent(adapter, keep):
    if Capability.COUNTERS not in adapter.info.capabilities:
        with pytest.raises(ndpy.UnsupportedError, match=f"{adapter.info.name} has no counters"):
            adapter.counters()
        pytest.skip(f"{adapter.info.name} does not claim COUNTERS")
    before = adapter.counters()
    pair = connect_pair(keep, adapter)
    for _ in range(10):
        assert_works(keep, pair)
    moved = changes(before, adapter.counters())
    assert sum(moved[adapter.info.ports[0].number].values()) >= 10
