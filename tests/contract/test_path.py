"""QueuePair.path: what the adapter itself says about the path of a connection."""

from __future__ import annotations

import ipaddress
import json

import psutil
import pytest
from kit.helpers import connect_pair, create_end, host_of

import ndpy
from ndpy.tools.doctor import LinkDescription, describe_link
from ndpy.vocabulary.quirks import Quirk, quirks_of


def has_paths(adapter) -> bool:
    return adapter.info.provider == "verbs" and Quirk.IWARP_NO_PATH_MTU not in quirks_of(adapter.info)


def test_there_is_no_path_without_a_connection(adapter, keep):
    queue_pair = create_end(keep, adapter).queue_pair
    with pytest.raises(ndpy.NotConnectedError):
        _ = queue_pair.path
    queue_pair.close()
    with pytest.raises(ndpy.ClosedError):
        _ = queue_pair.path


def test_both_ends_have_the_same_path(adapter, keep):
    pair = connect_pair(keep, adapter)
    near, far = pair.client.queue_pair.path, pair.server.queue_pair.path
    if not has_paths(adapter):
        assert (near, far) == (None, None)
        return
    assert near.mtu == far.mtu == adapter.info.mtu
    assert near.remote_qp_number == pair.server.queue_pair.number
    assert far.remote_qp_number == pair.client.queue_pair.number
    if adapter.info.transport == "RoCE":
        host = ipaddress.ip_address(host_of(adapter))
        assert near.local_gid.address == far.local_gid.address == str(host)
        assert near.local_gid.type == "RoCE v2"
        assert near.remote_gid == far.local_gid.value
        assert near.hop_limit > 0


def test_a_path_without_a_connection_manager_has_the_endpoints_values(adapter, keep):
    if not has_paths(adapter):
        pytest.skip("connects through connectors only")
    ends = [create_end(keep, adapter).queue_pair for _ in range(2)]
    endpoints = [end.local_endpoint() for end in ends]
    ends[0].connect_endpoint(endpoints[1])
    path = ends[0].path
    assert (path.mtu, path.remote_qp_number) == (endpoints[1].mtu, ends[1].number)
    assert path.remote_gid == endpoints[1].gid
    assert (path.local_gid.index, path.local_gid.type) == (endpoints[0].gid_index, endpoints[0].gid_type)


def test_the_link_of_an_adapter_is_described_by_its_name(adapter):
    found = describe_link(adapter.info.name)
    assert LinkDescription.from_dict(json.loads(json.dumps(found.to_dict()))).link_mtu == found.link_mtu
    assert (found.adapter, found.transport, found.port_state) == (adapter.info.name, adapter.info.transport, "active")
    assert found.netdev == adapter.info.netdev
    if found.netdev is not None or adapter.info.driver != "softverbs":
        assert found.link_mtu == psutil.net_if_stats()[found.netdev].mtu
    if has_paths(adapter):
        assert found.rdma_mtu == adapter.info.mtu
        assert (found.gid, found.gid_type, found.vlan) == (host_of(adapter), "RoCE v2", 0)
    with pytest.raises(ndpy.AdapterNotFoundError):
        describe_link("absent9")
