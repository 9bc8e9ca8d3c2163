"""Endpoints, their bytes, and the endpoint of a queue pair."""

from __future__ import annotations

import sys

import pytest

from ndpy import Endpoint

if sys.platform == "linux":
    from racing import Elsewhere

    from ndpy.platforms.verbs import queue_pair as queue_pairs

GID = bytes(range(16))


def test_the_bytes_are_in_network_order():
    endpoint = Endpoint(0x0102, 0x030405, 0x060708, GID, gid_index=3, gid_type="RoCE v2", mtu=1024, port=2)
    assert endpoint.to_bytes() == bytes.fromhex("00030405 00060708 0102 0400 ffff") + GID
    assert len(endpoint.to_bytes()) == 30


@pytest.mark.parametrize("limit", [None, 0, 16])
@pytest.mark.parametrize("mtu", [0, 256, 4096])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_come_back_as_what_a_peer_has_to_know(limit, mtu, kind):
    endpoint = Endpoint(7, (1 << 24) - 1, 0, GID, mtu=mtu, inbound_read_limit=limit)
    assert Endpoint.from_bytes(kind(endpoint.to_bytes())) == endpoint


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (bytes(29), "30 bytes, not 29"),
        (bytes(31), "30 bytes, not 31"),
        (b"\1" + bytes(29), "24 bits, not QPN 0x1000000"),
        (bytes(4) + b"\1" + bytes(25), "and PSN 0x1000000"),
        (bytes(10) + b"\0\3" + bytes(18), "mtu is .*, not 3"),
    ],
)
def test_bytes_that_are_no_endpoint_are_refused(data, said):
    with pytest.raises(ValueError, match=said):
        Endpoint.from_bytes(data)


@pytest.mark.skipif(sys.platform != "linux", reason="verbs are Linux's")
def test_two_threads_that_ask_a_queue_pair_first_get_the_same_endpoint(request, monkeypatch):
    fake = request.getfixturevalue("fake")
    others = []

    def local_endpoint_of(adapter, number, gid_index, psn):
        endpoint = Endpoint(0, number, len(others), GID)
        others.append(Elsewhere(queue_pair.local_endpoint))
        others[-1].start().thread.join(0.05)
        return endpoint

    monkeypatch.setattr(queue_pairs, "local_endpoint_of", local_endpoint_of)
    with fake.open_pair() as (_, _, queue_pair):
        assert queue_pair.local_endpoint() == others[0].result() == queue_pair.local_endpoint()
