"""Messages that invalidate the receiver's window: contract I.3.7, I.4.2."""

from __future__ import annotations

import pytest
from kit.helpers import (
    DEADLINE_S,
    assert_quiet,
    assert_refused,
    assert_works,
    bind,
    connect_pair,
    contents,
    contexts,
    create_end,
    memory,
    require,
    send_message,
    statuses,
    succeed,
    take,
)
from kit.quirks import expect_quirk

import ndpy
from ndpy import Access, Flags, Notify, Operation, RemoteMemory, Status
from ndpy.vocabulary.quirks import Quirk

READ, WRITE = Access.REMOTE_READ, Access.REMOTE_WRITE
SINK = Access.LOCAL_WRITE | Access.READ_SINK


@pytest.fixture
def invalidating(window_pair, keep):
    """Two connected ends. The client has sent a message, as iWARP demands, so now either end may send."""
    require(window_pair.adapter, ndpy.Capability.SEND_INVALIDATE)
    send_message(keep, window_pair.client, window_pair.server, b"hello")
    return window_pair


@pytest.fixture
def owner(keep, adapter):
    return memory(keep, adapter, b"original" * 16)


def new_window(keep, adapter):
    return keep(adapter.create_memory_window())


def test_i_3_7_the_window_is_unbound_when_the_message_has_come(invalidating, keep, owner):
    client, server = invalidating
    window = new_window(keep, invalidating.adapter)
    remote = bind(server, window, owner)
    inbox = memory(keep, invalidating.adapter, 64)
    server.queue_pair.receive(inbox, context=5)
    client.queue_pair.send_and_invalidate(memory(keep, invalidating.adapter, b"I am done"), remote, context=6)
    (sent,) = succeed(client.cq)
    (received,) = succeed(server.cq)
    assert (sent.operation, sent.context) == (Operation.SEND, 6)
    assert (received.operation, received.context, received.nbytes) == (Operation.RECEIVE, 5, 9)
    assert received.vendor_status == 0
    assert contents(inbox).startswith(b"I am done\0")
    assert not window.is_bound
    assert (window.region, window.queue_pair, window.length, window.access) == (None, None, 0, Access.NONE)
    with pytest.raises(ndpy.NdpyError):
        window.remote()
    assert_quiet(server.cq)
    # The region is no longer in use.
    owner.deregister(timeout_s=DEADLINE_S)
    assert_works(keep, invalidating)


def test_i_3_7_the_peer_cannot_use_the_window_any_more(invalidating, keep, owner):
    client, server = invalidating
    remote = bind(server, new_window(keep, invalidating.adapter), owner)
    server.queue_pair.receive([])
    client.queue_pair.send_and_invalidate([], remote)
    succeed(client.cq)
    succeed(server.cq)
    client.queue_pair.write(memory(keep, invalidating.adapter, b"intruder"), remote[:8], context=3)
    assert_refused(client, Operation.WRITE, 3)
    assert contents(owner) == b"original" * 16


def test_a_batch_sends_and_invalidates(invalidating, keep, owner):
    client, server = invalidating
    window = new_window(keep, invalidating.adapter)
    remote = bind(server, window, owner)
    server.queue_pair.receive([], context=5)
    batch = ndpy.Batch(1)
    batch.send_and_invalidate([], remote, context=6)
    client.queue_pair.post(batch)
    assert [done.context for done in succeed(client.cq)] == [6]
    assert [done.context for done in succeed(server.cq)] == [5]
    assert not window.is_bound


def test_i_3_7_the_window_can_be_bound_again(invalidating, keep, owner):
    client, server = invalidating
    window = new_window(keep, invalidating.adapter)
    local = memory(keep, invalidating.adapter, 8, SINK)
    tokens = set()
    for number in range(5):
        remote = bind(server, window, owner[8 * number : 8 * number + 64])
        tokens.add(remote.token)
        client.queue_pair.write(memory(keep, invalidating.adapter, b"round %02d" % number), remote[:8])
        server.queue_pair.receive([])
        # A slice of the descriptor names the same window.
        client.queue_pair.send_and_invalidate([], remote[8:16])
        succeed(client.cq, 2)
        succeed(server.cq)
        assert not window.is_bound
        assert contents(owner)[8 * number : 8 * number + 8] == b"round %02d" % number
    assert len(tokens) == 5
    remote = bind(server, window, owner[0:8])
    client.queue_pair.read(local, remote)
    succeed(client.cq)
    assert contents(local) == b"round 00"
    server.queue_pair.invalidate(window)
    succeed(server.cq)
    assert not window.is_bound


def test_i_4_2_other_windows_stay(invalidating, keep, owner):
    client, server = invalidating
    windows = [new_window(keep, invalidating.adapter) for _ in range(3)]
    remotes = [bind(server, window, owner) for window in windows]
    server.queue_pair.receive([])
    client.queue_pair.send_and_invalidate([], remotes[1])
    succeed(client.cq)
    succeed(server.cq)
    assert [window.is_bound for window in windows] == [True, False, True]
    local = memory(keep, invalidating.adapter, b"still ok")
    for remote in (remotes[0], remotes[2]):
        client.queue_pair.write(local, remote[:8])
        succeed(client.cq)
    assert contents(owner).startswith(b"still ok")
    with pytest.raises(ndpy.DeviceBusyError):
        owner.deregister()


def test_i_4_2_requests_before_it_still_use_the_window(invalidating, keep, owner):
    client, server = invalidating
    window = new_window(keep, invalidating.adapter)
    remote = bind(server, window, owner)
    local = memory(keep, invalidating.adapter, b"contents" * 16, SINK)
    for context in range(4):
        server.queue_pair.receive([], context=context)
    client.queue_pair.write(local, remote, context=1)
    client.queue_pair.send([], context=2)
    client.queue_pair.send_and_invalidate([], remote, context=3)
    client.queue_pair.send([], context=4)
    assert contexts(succeed(client.cq, 4)) == [1, 2, 3, 4]
    assert contexts(succeed(server.cq, 3)) == [0, 1, 2]
    assert contents(owner) == b"contents" * 16
    assert not window.is_bound


def test_i_4_2_the_flags_are_those_of_a_send(invalidating, keep, owner):
    client, server = invalidating
    region = memory(keep, invalidating.adapter, 8)
    for flags in (Flags.SILENT_SUCCESS, Flags.READ_FENCE, Flags.SOLICITED):
        window = new_window(keep, invalidating.adapter)
        remote = bind(server, window, owner)
        armed = server.cq.arm(Notify.SOLICITED) if flags is Flags.SOLICITED else None
        server.queue_pair.receive(region)
        client.queue_pair.send_and_invalidate(region[0:4], remote, context=7, flags=flags)
        if flags is Flags.SILENT_SUCCESS:
            assert_quiet(client.cq)
        else:
            succeed(client.cq)
        if armed is not None:
            armed.result(DEADLINE_S)
        assert [completion.nbytes for completion in succeed(server.cq)] == [4]
        assert not window.is_bound
    with pytest.raises(ndpy.InvalidFlagsError, match="send_and_invalidate"):
        client.queue_pair.send_and_invalidate(region, remote, flags=0x100)
    assert_works(keep, invalidating)


def test_i_4_2_inline_data(pair_with, keep, adapter):
    require(adapter, ndpy.Capability.MEMORY_WINDOWS, ndpy.Capability.SEND_INVALIDATE, ndpy.Capability.INLINE)
    pair = pair_with(inline_data_size=8)
    inbox = memory(keep, adapter, 8)
    window = new_window(keep, adapter)
    remote = bind(pair.server, window, memory(keep, adapter, 64))
    pair.server.queue_pair.receive(inbox)
    pair.client.queue_pair.send_and_invalidate(b"bytes", remote, flags=Flags.INLINE)
    succeed(pair.client.cq)
    succeed(pair.server.cq)
    assert contents(inbox) == b"bytes\0\0\0"
    assert not window.is_bound


def test_i_3_7_seen_through_a_poller(invalidating, keep, owner):
    client, server = invalidating
    window = new_window(keep, invalidating.adapter)
    remote = bind(server, window, owner)
    poller = keep(ndpy.Poller())
    poller.add(server.cq)
    server.queue_pair.receive([], context=8)
    client.queue_pair.send_and_invalidate([], remote)
    seen = []
    while not seen:
        for queue, completions in poller.wait(DEADLINE_S):
            assert queue is server.cq
            seen += completions
    assert contexts(seen) == [8]
    assert not window.is_bound


def test_i_4_2_with_a_shared_receive_queue(keep, adapter):
    require(
        adapter,
        ndpy.Capability.LOOPBACK_CONNECTIONS,
        ndpy.Capability.MEMORY_WINDOWS,
        ndpy.Capability.SEND_INVALIDATE,
        ndpy.Capability.SHARED_RECEIVE_QUEUES,
    )
    shared = keep(adapter.create_shared_receive_queue(4))
    pair = connect_pair(keep, adapter, srq=shared)
    window = new_window(keep, adapter)
    remote = bind(pair.server, window, memory(keep, adapter, 64))
    shared.receive([], context=9)
    pair.client.queue_pair.send_and_invalidate([], remote)
    succeed(pair.client.cq)
    (received,) = succeed(pair.server.cq)
    assert (received.context, received.queue_pair) == (9, pair.server.queue_pair)
    assert not window.is_bound


def test_i_4_2_a_window_of_another_connection_is_not_touched(request, invalidating, keep, owner):
    """The descriptor must name a window of the peer's end. Any other window ends the connection."""
    expect_quirk(request, invalidating.adapter, Quirk.RXE_INVALIDATES_ANY_WINDOW)
    client, server = invalidating
    second = connect_pair(keep, invalidating.adapter)
    window = new_window(keep, invalidating.adapter)
    remote = bind(second.server, window, owner)
    server.queue_pair.receive([], context=1)
    client.queue_pair.send_and_invalidate([], remote, context=2)
    (received,) = take(server.cq)
    assert not received.ok
    client.connector.wait_disconnected(DEADLINE_S)
    assert window.is_bound
    second.client.queue_pair.write(memory(keep, invalidating.adapter, b"untouched"), remote[:9])
    succeed(second.client.cq)
    assert contents(owner).startswith(b"untouched")


def test_i_4_2_an_unbound_window_ends_the_connection(request, invalidating, keep, owner):
    expect_quirk(request, invalidating.adapter, Quirk.RXE_INVALIDATE_OF_UNBOUND_WINDOW)
    client, server = invalidating
    window = new_window(keep, invalidating.adapter)
    stale = bind(server, window, owner)
    server.queue_pair.invalidate(window)
    succeed(server.cq)
    server.queue_pair.receive([], context=1)
    client.queue_pair.send_and_invalidate([], stale, context=2)
    client.connector.wait_disconnected(DEADLINE_S)
    server.connector.wait_disconnected(DEADLINE_S)
    assert Status.SUCCESS not in statuses(take(server.cq))


def test_a_window_dropped_while_its_invalidation_waits_to_be_seen(invalidating, keep, owner):
    client, server = invalidating
    window = invalidating.adapter.create_memory_window()
    remote = bind(server, window, owner)
    server.queue_pair.receive([], context=1)
    client.queue_pair.send_and_invalidate([], remote)
    succeed(client.cq)
    window.close()
    assert contexts(succeed(server.cq)) == [1]
    owner.deregister(timeout_s=DEADLINE_S)
    assert_works(keep, invalidating)


def test_f_2_2_it_needs_a_connection(adapter, keep):
    require(adapter, ndpy.Capability.SEND_INVALIDATE)
    end = create_end(keep, adapter)
    with pytest.raises(ndpy.NotConnectedError):
        end.queue_pair.send_and_invalidate([], RemoteMemory(4096, 8, 1))


def test_without_the_capability_it_is_refused_in_words(adapter, keep):
    if ndpy.Capability.SEND_INVALIDATE in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} claims SEND_INVALIDATE")
    end = create_end(keep, adapter)
    with pytest.raises(ndpy.UnsupportedError, match="invalidate"):
        end.queue_pair.send_and_invalidate([], RemoteMemory(4096, 8, 1))
