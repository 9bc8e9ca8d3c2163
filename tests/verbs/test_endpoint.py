"""Connections by endpoints, without a connection manager: how they are made, and the messages when they fail."""

from __future__ import annotations

import dataclasses
import time

import pytest
from kit.helpers import ask, assert_quiet, contexts, create_end, establish, memory, statuses, succeed, take
from kit.quirks import has_quirk, skip_where

import ndpy
from ndpy import Access, Endpoint, QueuePairState, Status
from ndpy.vocabulary.quirks import Quirk


@pytest.fixture
def ends(adapter, keep):
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
    return create_end(keep, adapter), create_end(keep, adapter)


def connect(near, far, mtu_of_far=None, **options) -> None:
    """Connect both ends. `mtu_of_far` replaces the path MTU that the near end learns. The far end learns none."""
    endpoints = near.local_endpoint(), far.local_endpoint()
    near_is_told = endpoints[1] if mtu_of_far is None else dataclasses.replace(endpoints[1], mtu=mtu_of_far)
    near.connect_endpoint(near_is_told, **options)
    far.connect_endpoint(dataclasses.replace(endpoints[0], mtu=0))


def failure(completion) -> str:
    with pytest.raises(ndpy.NdpyError) as raised:
        completion.raise_for_status()
    return str(raised.value)


def test_different_path_mtus_are_named_when_a_request_fails(adapter, keep, ends):
    skip_where(adapter, Quirk.IWARP_NO_PATH_MTU)
    near, far = ends
    mtu = adapter.info.mtu
    if mtu <= 512:
        pytest.skip(f"{adapter.info.name} has no two path MTUs to choose from")
    connect(near.queue_pair, far.queue_pair, mtu_of_far=512)
    target = memory(keep, adapter, 8192, Access.REMOTE_WRITE)
    near.queue_pair.write(memory(keep, adapter, 3000), target.remote())
    (completion,) = take(near.cq)
    assert completion.status in (Status.REMOTE_ERROR, Status.DATA_OVERRUN)
    said = failure(completion)
    assert f"MTU {mtu} to QPN" in said
    assert "MTU 512, with path MTU 512 on this end" in said
    assert "both ends need the same" in said


@pytest.mark.parametrize("lower_number", [True, False], ids=["lower number", "higher number"])
def test_both_ends_are_named_when_the_peer_does_not_answer(ends, lower_number):
    """On soft0 the end with the lower number makes the TCP connection, and the other end waits for it."""
    near, far = sorted(ends, key=lambda end: end.queue_pair.local_endpoint().qp_number, reverse=not lower_number)
    endpoints = near.queue_pair.local_endpoint(), far.queue_pair.local_endpoint()
    near.queue_pair.connect_endpoint(endpoints[1], retry=ndpy.RetryPolicy(retry_count=1, ack_timeout=8))
    near.queue_pair.send([])
    (completion,) = take(near.cq)
    assert completion.status is Status.IO_TIMEOUT
    said = failure(completion)
    for endpoint in endpoints:
        assert f"QPN {endpoint.qp_number:#x} at GID" in said


def test_only_requests_notice_that_the_peer_has_left(keep, ends):
    near, far = ends
    connect(near.queue_pair, far.queue_pair, retry=ndpy.RetryPolicy(retry_count=1, ack_timeout=8))
    for context in (1, 2):
        near.queue_pair.receive([], context=context)
    far.queue_pair.send([])
    succeed(far.cq)
    assert contexts(succeed(near.cq)) == [1]
    far.queue_pair.close()
    assert_quiet(near.cq)
    near.queue_pair.receive([], context=3)
    assert_quiet(near.cq)
    near.queue_pair.send([], context=4)
    near.queue_pair.send([], context=5)
    completions = take(near.cq, 4)
    assert sorted(zip(contexts(completions), statuses(completions), strict=True)) == [
        (2, Status.CANCELED),
        (3, Status.CANCELED),
        (4, Status.IO_TIMEOUT),
        (5, Status.CANCELED),
    ]


def test_a_request_under_way_gets_the_retry_time_when_the_peer_leaves(adapter, keep, ends):
    """The peer may have taken what this end still waits for. ibv_srq_pingpong leaves messages of its peer behind."""
    near, far = ends
    retry = ndpy.RetryPolicy(retry_count=6, ack_timeout=16)
    connect(near.queue_pair, far.queue_pair, retry=retry)
    target = memory(keep, adapter, 8, Access.REMOTE_WRITE)
    near.queue_pair.write(memory(keep, adapter, b"complete"), target.remote(), context=1)
    assert contexts(succeed(near.cq)) == [1]
    # No receive is posted for it.
    near.queue_pair.send([], context=2)
    begin = time.monotonic()
    far.queue_pair.close()
    (completion,) = take(near.cq)
    assert time.monotonic() - begin > 0.5
    assert (completion.context, completion.status) == (2, Status.IO_TIMEOUT)


def test_the_path_mtu_is_named_when_a_peer_of_a_connector_does_not_answer(keep, adapter):
    """Interfaces or switches on the way may carry less than the ports at both ends."""
    skip_where(adapter, Quirk.IWARP_NO_PATH_MTU)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    offer = ask(keep, adapter, client.queue_pair, retry=ndpy.RetryPolicy(retry_count=1, ack_timeout=14))
    establish(offer, server.queue_pair)
    # It takes no packet any more, and says nothing.
    server.queue_pair.modify(state=QueuePairState.ERROR)
    client.queue_pair.send([])
    (completion,) = take(client.cq)
    assert completion.status is Status.IO_TIMEOUT
    said = failure(completion)
    assert f"with path MTU {adapter.info.mtu} on this end" in said
    for host, port in (offer.client.local_address, offer.client.peer_address):
        assert f"{host} port {port}" in said


def test_a_peer_of_a_connector_without_a_receive_is_no_dead_network(pair):
    skip_where(pair.adapter, Quirk.IWARP_NO_PATH_MTU)
    pair.client.queue_pair.send([])
    (completion,) = take(pair.client.cq)
    assert completion.status is Status.IO_TIMEOUT
    said = failure(completion)
    assert "had no receive posted" in said
    for host, port in (pair.client.connector.local_address, pair.client.connector.peer_address):
        assert f"{host} port {port}" in said


def test_the_gid_is_chosen_by_index_or_by_address(ends):
    near, _ = ends
    port = near.adapter.info.ports[0]
    for gid in port.gids:
        assert near.queue_pair.local_endpoint(gid=gid.index) == near.queue_pair.local_endpoint(gid.index)
        chosen = near.queue_pair.local_endpoint(gid=gid.address)
        assert (chosen.gid, chosen.psn) == (gid.value, near.queue_pair.local_endpoint().psn)
    with pytest.raises(ValueError, match=r"gid_index=0 and gid=0 both choose"):
        near.queue_pair.local_endpoint(0, gid=0)


@pytest.mark.parametrize("mtu", [3, 1500, 8192, -1, "1024"])
def test_an_mtu_that_does_not_exist_is_refused_with_those_that_do(mtu):
    with pytest.raises(ValueError, match=f"mtu is 256, 512, 1024, 2048, 4096, or 0 .*, not {mtu!r}"):
        Endpoint(0, 1, 2, bytes(16), mtu=mtu)


def test_the_local_endpoint_stays_as_the_peer_knows_it(ends):
    queue_pair = ends[0].queue_pair
    told = queue_pair.local_endpoint()
    assert queue_pair.local_endpoint() == told
    # Only the requested field changes.
    assert queue_pair.local_endpoint(psn=5) == dataclasses.replace(told, psn=5)
    assert queue_pair.local_endpoint() == dataclasses.replace(told, psn=5)
    assert queue_pair.local_endpoint(gid_index=told.gid_index) == dataclasses.replace(told, psn=5)


def test_the_local_endpoint_of_a_connection_cannot_be_changed(ends):
    near, far = (end.queue_pair for end in ends)
    connect(near, far)
    connected = near.local_endpoint()
    with pytest.raises(ndpy.ConnectionActiveError):
        near.local_endpoint(psn=connected.psn ^ 1)
    assert near.local_endpoint() == connected


def test_connect_endpoint_takes_as_many_reads_as_both_ends_can(adapter, ends):
    near, far = (end.queue_pair for end in ends)
    connect(near, far)
    info = adapter.info
    for queue_pair in (near, far):
        limits = queue_pair.read_limits
        assert limits == (info.max_inbound_read_limit, min(info.max_outbound_read_limit, info.max_inbound_read_limit))


def test_the_read_limits_of_connect_endpoint_can_be_chosen(adapter, keep, ends):
    near, far = ends
    endpoints = near.queue_pair.local_endpoint(), far.queue_pair.local_endpoint()
    near.queue_pair.connect_endpoint(endpoints[1], inbound_read_limit=3, outbound_read_limit=2)
    assert near.queue_pair.read_limits == (3, 2)
    # The peer serves fewer reads than this end would issue at once. A limit above the adapter's is lowered.
    modest = dataclasses.replace(endpoints[0], inbound_read_limit=3)
    far.queue_pair.connect_endpoint(modest, inbound_read_limit=1000)
    assert far.queue_pair.read_limits == (adapter.info.max_inbound_read_limit, 3)
    source = memory(keep, adapter, b"to be read" * 8, Access.REMOTE_READ)
    sink = memory(keep, adapter, 80)
    for context in range(8):
        near.queue_pair.read(sink[context : context + 1], source.remote(context, 1), context=context)
    assert {completion.status for completion in take(near.cq, 8)} == {Status.SUCCESS}
    assert bytes(sink.buffer[:8]) == b"to be re"


def test_no_reads_at_all_are_refused_at_the_call(adapter, keep, ends):
    near, far = (end.queue_pair for end in ends)
    connect(near, far, outbound_read_limit=0)
    with pytest.raises(ndpy.NdpyError):
        near.read(memory(keep, adapter, 8), memory(keep, adapter, 8, Access.REMOTE_READ).remote())


def test_before_a_connection_there_are_no_read_limits(adapter, keep):
    with pytest.raises(ndpy.NotConnectedError):
        _ = create_end(keep, adapter).queue_pair.read_limits


def test_a_lost_iwarp_connection_is_not_explained_with_roce(pair):
    if not has_quirk(pair.adapter, Quirk.IWARP_NO_PATH_MTU):
        pytest.skip(f"{pair.adapter.info.name} does not speak iWARP")
    said = pair.client.queue_pair._explain(Status.IO_TIMEOUT)
    assert "4791" not in said and "GID" not in said
    assert "TCP" in said
    for host, port in (pair.client.connector.local_address, pair.client.connector.peer_address):
        assert f"{host} port {port}" in said
