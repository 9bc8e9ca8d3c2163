"""Connectors: contract section H. One file has all of it, because runs with --peer and as version 1 name it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import pytest
from kit.helpers import (
    CLOCK_TICK_S,
    DEADLINE_S,
    QUIET_S,
    Keeper,
    ask,
    assert_works,
    connect_ends,
    connect_pair,
    contents,
    create_end,
    establish,
    expose,
    host_of,
    kernel_resources,
    memory,
    open_another,
    require,
    require_reusable_queue_pairs,
    send_message,
    statuses,
    succeed,
    take,
    wait_until,
)
from kit.quirks import expect_quirk, skip_where
from kit.threads import in_threads

import ndpy
from ndpy import Access, Status
from ndpy.vocabulary.quirks import Quirk

# What an emulated machine may take to run a thread.
_SLACK_S = 3.0


@pytest.fixture
def ends(adapter, keep, peer):
    """Two unconnected ends."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return create_end(keep, adapter), create_end(keep, peer)


def offered(keep, adapter, client, server, **options):
    """Return an offer that the server has accepted and the client has not completed yet."""
    offer = ask(keep, adapter, client.queue_pair)
    accepting = offer.server.begin_accept(server.queue_pair, **options)
    offer.connecting.result(DEADLINE_S)
    return offer, accepting


def assert_private_data(connector, data) -> None:
    """The private data must be `data`. The transport may add zero bytes (H.7.3)."""
    assert connector.private_data[: len(data)] == data
    assert not connector.private_data[len(data) :].strip(b"\0")


# ---- H.1: the order of calls ----


def test_h_1_4_the_states_on_the_way(adapter, keep, ends):
    client, server = ends
    connector = keep(adapter.create_connector())
    assert connector.state == "idle"
    connector.bind((host_of(adapter), 0))
    assert connector.state == "bound"
    offer = ask(keep, adapter, client.queue_pair, client=connector)
    other = offer.server
    assert (connector.state, other.state) == ("connecting", "requested")
    accepting = other.begin_accept(server.queue_pair)
    offer.connecting.result(DEADLINE_S)
    assert connector.state == "offered"
    offer.complete(accepting)
    assert (connector.state, other.state) == ("established", "established")
    assert client.queue_pair.connector is connector
    assert (connector.queue_pair, other.queue_pair) == (client.queue_pair, server.queue_pair)
    connector.disconnect(DEADLINE_S)
    other.wait_disconnected(DEADLINE_S)
    assert (connector.state, other.state) == ("disconnected", "disconnected")


def test_h_1_1_connect_waits_for_the_accept(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    with pytest.raises(ndpy.TimeoutError):
        offer.connecting.result(QUIET_S)
    establish(offer, server.queue_pair)


def test_h_1_1_accept_waits_for_the_completion(adapter, keep, ends):
    require(adapter, ndpy.Capability.REFUSE_OFFER)
    offer, accepting = offered(keep, adapter, *ends)
    with pytest.raises(ndpy.TimeoutError):
        accepting.result(QUIET_S)
    offer.complete(accepting)


def test_h_1_2_a_slow_application_is_no_timeout(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    time.sleep(3)
    accepting = offer.server.begin_accept(server.queue_pair)
    offer.connecting.result(DEADLINE_S)
    time.sleep(3)
    offer.complete(accepting)
    send_message(keep, client, server, b"in the end")


def test_what_a_server_sent_before_it_left_arrives(adapter, keep, ends):
    """On iWARP the server's connection is up as soon as it accepts. The client joins it with complete_connect()."""
    if ndpy.Capability.REFUSE_OFFER in adapter.info.capabilities:
        pytest.skip(f"on {adapter.info.name} a server cannot send before the client has completed the connection")
    client, server = ends
    inbox = memory(keep, adapter, 64)
    for context in (1, 2):
        client.queue_pair.receive(inbox, context=context)
    offer, accepting = offered(keep, adapter, client, server)
    accepting.result(DEADLINE_S)
    server.queue_pair.send(memory(keep, server.adapter, b"all there is"))
    succeed(server.cq)
    offer.server.disconnect(DEADLINE_S)
    time.sleep(QUIET_S)
    offer.client.complete_connect(DEADLINE_S)
    message, rest = take(client.cq, 2)
    assert (message.status, message.context, message.nbytes) == (Status.SUCCESS, 1, 12)
    assert contents(inbox).startswith(b"all there is")
    assert (rest.status, rest.context) == (Status.CANCELED, 2)
    assert offer.client.state == "disconnected"
    offer.client.wait_disconnected(DEADLINE_S)
    client.queue_pair.send([], context=3)
    assert statuses(take(client.cq)) == [Status.CANCELED]
    offer.client.disconnect(DEADLINE_S)


# ---- H.2: bind ----


def test_h_2_1_bind_chooses_the_local_address(adapter, keep, ends):
    client, server = ends
    connector = keep(adapter.create_connector())
    connector.bind((host_of(adapter), 0))
    host, port = connector.local_address[:2]
    assert host == host_of(adapter)
    assert port >= 1024
    offer = ask(keep, adapter, client.queue_pair, client=connector)
    assert offer.server.peer_address[:2] == (host, port)
    establish(offer, server.queue_pair)


def test_h_2_2_an_address_in_use_is_refused(adapter, keep):
    require(adapter, ndpy.Capability.BIND_RESERVES_PORT)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.AddressInUseError):
        connector.bind(listener.address)


def test_h_2_3_bind_after_connect_is_refused_and_does_no_harm(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    with pytest.raises(ndpy.NdpyError):
        offer.client.bind((host_of(adapter), 0))
    establish(offer, server.queue_pair)


def test_h_2_4_connect_works_after_a_second_bind(adapter, keep, ends):
    client, server = ends
    connector = keep(adapter.create_connector())
    connector.bind((host_of(adapter), 0))
    assert connector.state == "bound"
    try:
        connector.bind((host_of(adapter), 0))
    except ndpy.NdpyError:
        assert connector.state == "bound"
    establish(ask(keep, adapter, client.queue_pair, client=connector), server.queue_pair)


def test_h_2_6_a_foreign_local_address_is_refused(adapter, keep):
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.AddressUnreachableError):
        connector.bind(("203.0.113.77", 0))
    assert connector.state == "idle"


# ---- H.4: connect ----


def test_h_4_2_nobody_listens(adapter, keep, ends, peer):
    listener = peer.listen((host_of(peer), 0))
    address = listener.address
    listener.close()
    connector = keep(adapter.create_connector())
    begin = time.monotonic()
    with pytest.raises(ndpy.ConnectionRefusedError) as refused:
        connector.connect(ends[0].queue_pair, address, timeout_s=DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2
    assert isinstance(refused.value, ConnectionRefusedError)
    assert str(address[1]) in str(refused.value)


def test_h_4_2_a_rejection_carries_private_data(adapter, keep, ends):
    offer = ask(keep, adapter, ends[0].queue_pair)
    offer.server.reject(b"no room today")
    with pytest.raises(ndpy.ConnectionRefusedError):
        offer.connecting.result(DEADLINE_S)
    assert offer.client.private_data.startswith(b"no room today")


def test_h_4_4_a_refused_connector_may_retry(adapter, keep, ends):
    require_reusable_queue_pairs(adapter)
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    offer.server.reject()
    with pytest.raises(ndpy.ConnectionRefusedError):
        offer.connecting.result(DEADLINE_S)
    again = ask(keep, adapter, client.queue_pair, client=offer.client, listener=offer.listener)
    establish(again, server.queue_pair)
    send_message(keep, client, server, b"second try")


def test_h_4_2_a_timeout_while_the_server_is_silent(adapter, keep, ends, peer):
    listener = keep(peer.listen((host_of(peer), 0)))
    connector = keep(adapter.create_connector())
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        connector.connect(ends[0].queue_pair, listener.address, timeout_s=0.5)
    assert 0.5 - CLOCK_TICK_S <= time.monotonic() - begin < DEADLINE_S
    assert ends[0].cq.poll() == []


@pytest.fixture
def silent_host(adapter):
    """The address of a host that has a neighbour entry and never answers: its power was cut a moment ago."""
    if not Path("/dev/virtio-ports/ndpy.control").exists() or os.geteuid():
        pytest.skip("adds a neighbour: only inside the VM of `ndpy vm run`")
    host = host_of(adapter).rpartition(".")[0] + ".99"
    route = subprocess.run(["ip", "route", "get", host], capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    device = route.stdout.split("dev ")[1].split()[0]
    entry = [host, "lladdr", "02:00:00:00:00:99", "dev", device]
    subprocess.run(["ip", "neigh", "replace", *entry, "nud", "permanent"], timeout=DEADLINE_S, check=True)
    yield host
    subprocess.run(["ip", "neigh", "del", *entry], timeout=DEADLINE_S, check=True)


def test_h_4_2_a_silent_host_holds_up_nobody_else(adapter, peer, silent_host):
    """siw's kernel waits for it in rdma_connect(), for up to 127 s (Quirk.SIW_CONNECT_BLOCKS)."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    resources = kernel_resources()
    keep = Keeper()
    client, failing, left, closed = (create_end(keep, adapter) for _ in range(4))
    server = create_end(keep, peer)
    begun = [
        keep(adapter.create_connector()).begin_connect(end.queue_pair, (silent_host, 7000)) for end in (left, closed)
    ]
    start = time.monotonic()
    with pytest.raises(ndpy.TimeoutError, match=re.escape(silent_host)):
        adapter.connect(failing.queue_pair, (silent_host, 7000), timeout_s=2)
    assert time.monotonic() - start < 2 + _SLACK_S
    assert_works(keep, connect_ends(keep, adapter, client, server))
    assert not any(pending.done() for pending in begun)
    start = time.monotonic()
    closed.queue_pair.close()
    keep.close()
    for pending in begun:
        with pytest.raises(ndpy.CanceledError):
            pending.result(0)
    assert time.monotonic() - start < 2 * _SLACK_S
    wait_until(lambda: kernel_resources() == resources, "the kernel has let go of everything")


def test_h_4_2_an_address_nobody_has(adapter, keep, ends):
    """The address is on the adapter's own network, so there is a route, but nobody answers."""
    address = host_of(adapter)
    neighbour = address.rpartition(":")[0] + ":77" if ":" in address else address.rpartition(".")[0] + ".77"
    connector = keep(adapter.create_connector())
    begin = time.monotonic()
    with pytest.raises((ndpy.AddressUnreachableError, ndpy.TimeoutError)):
        connector.connect(ends[0].queue_pair, (neighbour, 7000), timeout_s=3 * DEADLINE_S)
    # The system gives up on its own, before the deadline.
    assert time.monotonic() - begin < 2 * DEADLINE_S


@pytest.mark.parametrize("address", [("0.0.0.0", 7000), ("::", 7000)])
def test_h_4_2_the_wildcard_is_no_destination(adapter, keep, ends, address):
    connector = keep(adapter.create_connector())
    with pytest.raises((ndpy.AddressUnreachableError, ValueError)):
        connector.connect(ends[0].queue_pair, address, timeout_s=DEADLINE_S)


@pytest.mark.parametrize("address", ["text", ("host",), None, ("192.0.2.1", 70000)])
def test_h_4_2_what_is_no_address_is_refused(adapter, keep, ends, address):
    connector = keep(adapter.create_connector())
    with pytest.raises(ValueError):
        connector.connect(ends[0].queue_pair, address, timeout_s=DEADLINE_S)
    assert connector.state == "idle"


def test_h_4_2_nothing_can_be_reached_at_port_0(adapter, keep, ends):
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.AddressUnreachableError, match="port 0"):
        connector.begin_connect(ends[0].queue_pair, (host_of(ends[1].adapter), 0))
    assert connector.state == "idle"


def test_h_4_5_private_data_up_to_the_limit_arrive(adapter, keep, ends):
    client, server = ends
    data = bytes(1 + index % 255 for index in range(adapter.info.max_caller_data))
    offer = ask(keep, adapter, client.queue_pair, private_data=data)
    assert_private_data(offer.server, data)
    establish(offer, server.queue_pair)


def test_h_4_2_longer_private_data_are_refused_inline_and_do_no_harm(adapter, keep, ends, peer):
    client, server = ends
    listener = keep(peer.listen((host_of(peer), 0)))
    connector = keep(adapter.create_connector())
    limit = adapter.info.max_caller_data
    with pytest.raises(ndpy.LimitExceededError, match=str(limit)):
        connector.begin_connect(client.queue_pair, listener.address, private_data=bytes(limit + 1))
    assert connector.state == "idle"
    establish(ask(keep, adapter, client.queue_pair, client=connector, listener=listener), server.queue_pair)


def test_h_4_2_a_queue_pair_of_another_adapter_is_refused(adapter, keep, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    foreign = create_end(keep, other)
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.ForeignObjectError):
        connector.begin_connect(foreign.queue_pair, (host_of(adapter), 7000))
    assert connector.state == "idle"


def test_h_4_6_read_limits_above_the_adapters_are_lowered_silently(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair, inbound_read_limit=100_000, outbound_read_limit=100_000)
    assert offer.server.read_limits.inbound <= server.adapter.info.max_inbound_read_limit
    assert offer.server.read_limits.outbound <= server.adapter.info.max_outbound_read_limit
    establish(offer, server.queue_pair, inbound_read_limit=100_000, outbound_read_limit=100_000)
    send_message(keep, client, server, b"connected")


def test_h_4_7_a_second_connect_is_refused_and_the_first_goes_on(adapter, keep, ends):
    client, server = ends
    third = create_end(keep, adapter)
    offer, accepting = offered(keep, adapter, client, server)
    with pytest.raises(ndpy.NdpyError):
        offer.client.begin_connect(third.queue_pair, offer.listener.address)
    another = keep(adapter.create_connector())
    with pytest.raises(ndpy.NdpyError):
        another.begin_connect(client.queue_pair, offer.listener.address)
    offer.complete(accepting)
    send_message(keep, client, server, b"the first")


@pytest.mark.parametrize("what", ["connector", "queue pair"])
def test_h_4_8_closing_while_offered_abandons_like_a_rejection(adapter, keep, ends, what):
    require(adapter, ndpy.Capability.REFUSE_OFFER)
    offer, accepting = offered(keep, adapter, *ends)
    (offer.client if what == "connector" else ends[0].queue_pair).close()
    with pytest.raises(ndpy.ConnectionRefusedError):
        accepting.result(DEADLINE_S)


def test_h_4_9_an_accept_after_the_client_has_gone_is_aborted(adapter, keep, ends):
    require(adapter, ndpy.Capability.REFUSE_OFFER)
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    offer.client.close()
    time.sleep(QUIET_S)
    with pytest.raises((ndpy.ConnectionAbortedError, ndpy.ConnectionRefusedError)):
        offer.server.accept(server.queue_pair, timeout_s=DEADLINE_S)


def test_h_4_2_cancelling_gives_the_attempt_up(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    assert offer.connecting.cancel()
    with pytest.raises(ndpy.CanceledError):
        offer.connecting.result(0)
    assert_works(keep, connect_ends(keep, adapter, create_end(keep, adapter), server))


# ---- H.5: complete and accept ----


def test_h_5_1_complete_needs_an_offer(adapter, keep, ends):
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.NotConnectedError):
        connector.complete_connect(DEADLINE_S)
    offer = ask(keep, adapter, ends[0].queue_pair)
    with pytest.raises(ndpy.NotConnectedError):
        offer.client.complete_connect(DEADLINE_S)
    establish(offer, ends[1].queue_pair)
    with pytest.raises(ndpy.NotConnectedError):
        offer.client.complete_connect(DEADLINE_S)


def test_h_5_3_accept_takes_a_queue_pair_of_the_same_adapter(adapter, keep, ends):
    client, server = ends
    foreign = create_end(keep, open_another(keep, server.adapter))
    offer = ask(keep, adapter, client.queue_pair)
    with pytest.raises(ndpy.ForeignObjectError):
        offer.server.begin_accept(foreign.queue_pair)
    establish(offer, server.queue_pair)


def test_h_5_4_too_long_private_data_leave_the_request_intact(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    limit = server.adapter.info.max_callee_data
    with pytest.raises(ndpy.LimitExceededError, match=str(limit)):
        offer.server.begin_accept(server.queue_pair, private_data=bytes(limit + 1))
    assert offer.server.state == "requested"
    establish(offer, server.queue_pair)


def test_h_5_4_a_connected_queue_pair_cannot_accept(adapter, keep, pair):
    client = create_end(keep, adapter)
    offer = ask(keep, adapter, client.queue_pair)
    with pytest.raises(ndpy.NdpyError):
        offer.server.begin_accept(pair.server.queue_pair)
    establish(offer, create_end(keep, pair.server.adapter).queue_pair)
    assert_works(keep, pair)


def test_h_5_4_accept_needs_a_request(adapter, keep, ends):
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.NotConnectedError):
        connector.begin_accept(ends[0].queue_pair)


def test_h_5_5_accept_succeeds_although_the_client_disconnects_at_once(adapter, keep, ends):
    client, server = ends
    offer, accepting = offered(keep, adapter, client, server)
    offer.client.complete_connect(DEADLINE_S)
    offer.client.disconnect(DEADLINE_S)
    accepting.result(DEADLINE_S)
    offer.server.wait_disconnected(DEADLINE_S)


def test_h_5_8_private_data_of_the_server_arrive_before_the_client_completes(adapter, keep, ends):
    client, server = ends
    data = bytes(index % 255 + 1 for index in range(server.adapter.info.max_callee_data))
    offer, accepting = offered(keep, adapter, client, server, private_data=data)
    assert_private_data(offer.client, data)
    offer.complete(accepting)


# ---- H.6: reject ----


def test_h_6_2_the_client_can_refuse_the_offer(adapter, keep, ends):
    require(adapter, ndpy.Capability.REFUSE_OFFER)
    offer, accepting = offered(keep, adapter, *ends)
    offer.client.reject()
    with pytest.raises(ndpy.ConnectionRefusedError):
        accepting.result(DEADLINE_S)


def test_h_6_2_without_the_capability_refusing_an_offer_ends_the_connection(adapter, keep, ends):
    if ndpy.Capability.REFUSE_OFFER in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} claims REFUSE_OFFER")
    offer, accepting = offered(keep, adapter, *ends)
    accepting.result(DEADLINE_S)
    offer.client.reject()
    offer.server.wait_disconnected(DEADLINE_S)


def test_h_6_3_too_much_to_say_leaves_the_request_intact(adapter, keep, ends):
    offer = ask(keep, adapter, ends[0].queue_pair)
    with pytest.raises(ndpy.LimitExceededError):
        offer.server.reject(bytes(ends[1].adapter.info.max_callee_data + 1))
    establish(offer, ends[1].queue_pair)


def test_h_6_3_reject_needs_a_request_or_an_offer(adapter, keep, pair):
    for connector in (keep(adapter.create_connector()), pair.client.connector, pair.server.connector):
        with pytest.raises(ndpy.NotConnectedError):
            connector.reject()
    assert_works(keep, pair)


def test_h_6_4_closing_a_request_refuses_it(adapter, keep, ends):
    offer = ask(keep, adapter, ends[0].queue_pair)
    offer.server.close()
    with pytest.raises(ndpy.ConnectionRefusedError):
        offer.connecting.result(DEADLINE_S)


# ---- H.7: queries ----


def test_h_7_1_queries_before_there_is_an_answer_are_refused(adapter, keep):
    connector = keep(adapter.create_connector())
    for name in ("private_data", "read_limits", "local_address", "peer_address"):
        with pytest.raises(ndpy.NotConnectedError):
            getattr(connector, name)


def test_h_7_3_no_private_data_is_nothing(adapter, keep, ends):
    offer = ask(keep, adapter, ends[0].queue_pair)
    assert not offer.server.private_data.strip(b"\0")
    establish(offer, ends[1].queue_pair)
    assert not offer.client.private_data.strip(b"\0")


def test_h_7_5_read_limits_are_seen_from_the_caller(request, adapter, keep, ends):
    """The contract's example: connect(4, 7) gives the server (7, 4), and accept(5, 3) gives the client (3, 5)."""
    expect_quirk(request, adapter, Quirk.SIW_IGNORES_READ_LIMIT)
    info = adapter.info
    if min(info.max_inbound_read_limit, info.max_outbound_read_limit) < 7:
        pytest.skip(f"{info.name} runs fewer than 7 reads at once")
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair, inbound_read_limit=4, outbound_read_limit=7)
    assert tuple(offer.server.read_limits) == (7, 4)
    accepting = offer.server.begin_accept(server.queue_pair, inbound_read_limit=5, outbound_read_limit=3)
    offer.connecting.result(DEADLINE_S)
    assert tuple(offer.client.read_limits) == (3, 5)
    offer.complete(accepting)


def test_f_3_13_a_read_without_a_read_limit_is_invalid(adapter, keep, ends):
    """The read is refused when it is posted, or it completes as invalid. It never hangs."""
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair, outbound_read_limit=0)
    establish(offer, server.queue_pair)
    owner = memory(keep, server.adapter, b"contents", Access.REMOTE_READ)
    remote = expose(keep, server, owner)
    sink = memory(keep, adapter, b"original", Access.LOCAL_WRITE | Access.READ_SINK)
    try:
        client.queue_pair.read(sink, remote, context=1)
    except ndpy.LimitExceededError:
        send_message(keep, client, server, b"unharmed")
    else:
        (completion,) = take(client.cq)
        assert (completion.context, completion.status) == (1, Status.INVALID_REQUEST)
    assert bytes(sink.buffer) == b"original"


def test_h_7_8_each_side_sees_the_others_address(pair):
    client, server = pair.client.connector, pair.server.connector
    assert client.local_address[:2] == server.peer_address[:2]
    assert client.peer_address[:2] == server.local_address[:2]
    assert client.local_address[0] == host_of(pair.client.adapter)
    assert server.local_address[0] == host_of(pair.server.adapter)


def test_an_ipv6_connection(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair, version=6)
    establish(offer, server.queue_pair)
    assert offer.client.peer_address[0] == offer.server.local_address[0] == host_of(server.adapter, 6)
    assert offer.server.peer_address[0] == offer.client.local_address[0] == host_of(adapter, 6)
    send_message(keep, client, server, b"over IPv6")


# ---- H.8: disconnect ----


def test_h_8_1_the_notification_needs_a_connection(adapter, keep):
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.NotConnectedError):
        connector.begin_wait_disconnected()
    with pytest.raises(ndpy.NotConnectedError):
        connector.disconnect(DEADLINE_S)


@pytest.mark.parametrize("who", ["client", "server"])
def test_h_8_1_the_notification_comes_with_the_peers_disconnect(pair, who):
    leaving, staying = (pair.client, pair.server) if who == "client" else (pair.server, pair.client)
    notified = [staying.connector.begin_wait_disconnected() for _ in range(2)]
    with pytest.raises(ndpy.TimeoutError):
        notified[0].result(QUIET_S)
    leaving.connector.disconnect(DEADLINE_S)
    for pending in notified:
        pending.result(DEADLINE_S)


def test_h_8_1_the_notification_comes_although_messages_find_no_receive(keep, adapter, peer):
    """More of them than the buffers on the way hold, but not so many that they fill the sender's too."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    skip_where(adapter, Quirk.IWARP_NO_RECEIVER_NOT_READY)  # the first of them ends the connection
    endless = ndpy.Capability.RETRY_POLICY in adapter.info.capabilities
    policy = {"retry": ndpy.RetryPolicy(rnr_retry_count=ndpy.RetryPolicy.ENDLESS)} if endless else {}
    client, server = create_end(keep, adapter), create_end(keep, peer)
    offer = ask(keep, adapter, client.queue_pair, **policy)
    establish(offer, server.queue_pair, **policy)
    region = memory(keep, adapter, 65536)
    for i in range(16):
        client.queue_pair.send(region, context=i)
    time.sleep(QUIET_S)
    offer.client.begin_disconnect()
    offer.server.wait_disconnected(DEADLINE_S)


def test_h_8_2_after_the_peers_disconnect_the_notification_is_there_at_once(pair):
    pair.client.connector.disconnect(DEADLINE_S)
    wait_until(lambda: pair.server.connector.state == "disconnected", "the server hears of it")
    pair.server.connector.wait_disconnected(DEADLINE_S)
    pair.server.connector.wait_disconnected(0)


def test_wait_disconnected_times_out(pair, keep):
    with pytest.raises(TimeoutError):
        pair.client.connector.wait_disconnected(0.1)
    assert_works(keep, pair)


def test_waits_for_the_end_that_were_given_up_leave_nothing_with_the_connector(pair):
    connector = pair.client.connector
    for _ in range(50):
        with pytest.raises(ndpy.TimeoutError):
            connector.wait_disconnected(0)
        assert connector.begin_wait_disconnected().cancel()
    assert not connector._watching
    wanted = connector.begin_wait_disconnected()
    pair.server.connector.disconnect(DEADLINE_S)
    wanted.result(DEADLINE_S)


def test_h_8_3_a_cancelled_notification_is_cancelled(pair, keep):
    notified = pair.client.connector.begin_wait_disconnected()
    assert notified.cancel()
    with pytest.raises(ndpy.CanceledError):
        notified.result(0)
    assert_works(keep, pair)


def test_h_8_6_both_disconnects_succeed(pair):
    pair.client.connector.disconnect(DEADLINE_S)
    pair.server.connector.wait_disconnected(DEADLINE_S)
    pair.server.connector.disconnect(DEADLINE_S)
    for end in pair:
        with pytest.raises(ndpy.NotConnectedError):
            end.connector.disconnect(DEADLINE_S)


def test_h_8_6_disconnects_at_once_from_both_sides_succeed(pair):
    pendings = [end.connector.begin_disconnect() for end in pair]
    for pending in pendings:
        pending.result(DEADLINE_S)


def test_h_8_7_disconnect_needs_nothing_from_the_peers_program(pair):
    begin = time.monotonic()
    pair.server.connector.disconnect(DEADLINE_S)
    assert time.monotonic() - begin < DEADLINE_S / 2
    assert pair.server.connector.state == "disconnected"


def test_h_8_9_closing_a_connector_disconnects(pair, keep):
    pair.client.queue_pair.receive(memory(keep, pair.adapter, 8), context=1)
    pair.server.connector.close()
    pair.client.connector.wait_disconnected(DEADLINE_S)
    assert statuses(take(pair.client.cq)) == [Status.CANCELED]


def test_a_closed_connector_cannot_be_used(adapter, keep, ends):
    connector = adapter.create_connector()
    connector.close()
    connector.close()
    for use in (
        lambda: connector.bind((host_of(adapter), 0)),
        lambda: connector.connect(ends[0].queue_pair, (host_of(adapter), 7000)),
        lambda: connector.complete_connect(0),
        lambda: connector.disconnect(0),
        lambda: connector.wait_disconnected(0),
        lambda: connector.reject(),
    ):
        with pytest.raises(ndpy.ClosedError):
            use()


def test_connections_come_and_go_in_threads(adapter, keep, peer):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)

    def work(_) -> None:
        for _ in range(3):
            with adapter.create_completion_queue(8) as first, peer.create_completion_queue(8) as second:
                run_once(adapter, peer, first, second)

    in_threads(3, work, 3 * DEADLINE_S)
    assert_works(keep, connect_pair(keep, adapter))


def run_once(adapter, peer, first, second) -> None:
    with (
        adapter.create_queue_pair(first) as client,
        peer.create_queue_pair(second) as server,
        peer.listen((host_of(peer), 0)) as listener,
        adapter.create_connector() as connector,
    ):
        offer = ask(lambda thing: thing, adapter, client, client=connector, listener=listener)
        with offer.server:
            establish(offer, server)
            server.receive([], context=1)
            client.send([])
            assert second.wait(DEADLINE_S)[0].context == 1
            connector.disconnect(DEADLINE_S)


def hold_up_for_long(monkeypatch) -> None:
    """A thread that rests goes on after a while, which a slow machine may need for what the test does meanwhile."""
    monkeypatch.setattr("ndpy.objects.adapter_thread._LONGEST_REST_S", DEADLINE_S)


@pytest.mark.parametrize("shared", [False, True], ids=["own receives", "shared receives"])
def test_the_first_message_proves_the_connection(keep, adapter, monkeypatch, shared):
    """It may be taken before accept() has ended. Then the server can answer."""
    other = open_another(keep, adapter)
    options = {}
    if shared:
        require(adapter, ndpy.Capability.SHARED_RECEIVE_QUEUES)
        options["srq"] = keep(adapter.create_shared_receive_queue(4))
    client, server = create_end(keep, other), create_end(keep, adapter, **options)
    incoming, question = memory(keep, adapter, 16), memory(keep, other, b"question")
    answer = memory(keep, other, 16)
    (options["srq"] if shared else server.queue_pair).receive(incoming[0:16])
    client.queue_pair.receive(answer[0:16])
    offer = ask(keep, other, client.queue_pair, to=adapter)
    # The thread that would learn that the connection is up is held up. On iWARP it is up when the server has answered.
    hold_up_for_long(monkeypatch)
    with adapter._events.resting(DEADLINE_S):
        accepting = offer.server.begin_accept(server.queue_pair)
        offer.connecting.result(DEADLINE_S)
        with pytest.raises(ndpy.NotConnectedError):
            server.queue_pair.send(incoming[0:8])
        offer.client.complete_connect(DEADLINE_S)
        client.queue_pair.send(question[0:8])
        completion = succeed(server.cq)[0]
        assert not accepting.done()
        completion.queue_pair.send(incoming[0:8])
    accepting.result(DEADLINE_S)
    assert offer.server.state == "established"
    succeed(server.cq)
    succeed(client.cq, 2)
    assert contents(answer)[:8] == b"question"


def test_a_client_that_vanishes_after_its_first_message_ends_the_connection(keep, adapter, monkeypatch):
    other = open_another(keep, adapter)
    client, server = create_end(keep, other), create_end(keep, adapter)
    incoming, question = memory(keep, adapter, 16), memory(keep, other, b"question")
    server.queue_pair.receive(incoming[0:16])
    offer = ask(keep, other, client.queue_pair, to=adapter)
    hold_up_for_long(monkeypatch)
    with adapter._events.resting(DEADLINE_S):
        accepting = offer.server.begin_accept(server.queue_pair)
        offer.connecting.result(DEADLINE_S)
        offer.client.complete_connect(DEADLINE_S)
        client.queue_pair.send(question[0:8])
        succeed(server.cq)
        server.queue_pair.receive(incoming[0:16])
        client.queue_pair.close()
    with contextlib.suppress(ndpy.ConnectionAbortedError):
        accepting.result(DEADLINE_S)
        offer.server.wait_disconnected(DEADLINE_S)
    assert take(server.cq)[0].status is ndpy.Status.CANCELED
    server.queue_pair.send(incoming[0:8])
    assert take(server.cq)[0].status is ndpy.Status.CANCELED


@pytest.mark.parametrize("data", [5, "hello", [1, 2, 3]])
def test_private_data_that_are_no_buffer_are_refused_by_every_call(adapter, keep, data):
    """Nothing has changed: the queue pair can be connected afterwards."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    listener = keep(adapter.listen((host_of(adapter), 0)))
    connector = keep(adapter.create_connector())
    with pytest.raises(TypeError, match="private_data"):
        connector.begin_connect(client.queue_pair, listener.address, private_data=data)
    offer = ask(keep, adapter, client.queue_pair, client=connector, listener=listener, private_data=b"x")
    request = offer.server
    for refused in (
        lambda: request.accept(server.queue_pair, private_data=data, timeout_s=DEADLINE_S),
        lambda: request.reject(private_data=data),
    ):
        with pytest.raises(TypeError, match="private_data"):
            refused()
    request.reject()
    with pytest.raises(ndpy.ConnectionRefusedError):
        offer.connecting.result(DEADLINE_S)
