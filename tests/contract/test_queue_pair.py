"""Queue pairs: contract F.1 to F.4. test_queue_pair_endings.py tests how their requests end."""

from __future__ import annotations

import time

import pytest
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_quiet,
    assert_works,
    connect_ends,
    contents,
    contexts,
    create_end,
    expose,
    fill,
    memory,
    require,
    require_acknowledged_sends,
    statuses,
    succeed,
    take,
    wait_until,
)
from kit.quirks import has_quirk

import ndpy
from ndpy import Access, Flags, Operation, RemoteMemory, Status
from ndpy.vocabulary.quirks import Quirk

SINK = Access.LOCAL_WRITE | Access.READ_SINK


# ---- F.1: creation ----


def limits_of(info) -> dict[str, int]:
    return {
        "receive_queue_depth": info.max_receive_queue_depth,
        "initiator_queue_depth": info.max_initiator_queue_depth,
        "max_receive_sge": info.max_receive_sge,
        "max_initiator_sge": info.max_initiator_sge,
        "inline_data_size": info.max_inline_data_size,
    }


def test_f_1_1_a_crowd_of_queue_pairs_can_be_created(adapter, keep):
    """siw's library alone stops after 36 (Quirk.SIW_REFUSES_A_PAGE)."""
    cq = keep(adapter.create_completion_queue(16))
    for number in range(150):
        keep(adapter.create_queue_pair(cq, receive_queue_depth=1 + number % 64))


@pytest.mark.parametrize(
    "name", ["receive_queue_depth", "initiator_queue_depth", "max_receive_sge", "max_initiator_sge"]
)
def test_f_1_1_one_more_than_the_limit_is_refused(adapter, keep, name):
    cq = keep(adapter.create_completion_queue(16))
    limit = limits_of(adapter.info)[name]
    with pytest.raises(ndpy.LimitExceededError, match=str(limit)):
        adapter.create_queue_pair(cq, **{name: limit + 1})


def test_f_1_1_more_inline_data_than_the_limit_is_refused(adapter, keep):
    cq = keep(adapter.create_completion_queue(16))
    with pytest.raises(ndpy.LimitExceededError):
        adapter.create_queue_pair(cq, inline_data_size=adapter.info.max_inline_data_size + 1)


@pytest.mark.parametrize(
    "name", ["receive_queue_depth", "initiator_queue_depth", "max_receive_sge", "max_initiator_sge"]
)
@pytest.mark.parametrize("value", [-1, 1 << 40])
def test_f_1_1_senseless_values_are_refused(adapter, keep, name, value):
    cq = keep(adapter.create_completion_queue(16))
    with pytest.raises(ndpy.LimitExceededError):
        adapter.create_queue_pair(cq, **{name: value})


@pytest.mark.parametrize(
    "names",
    [
        ("receive_queue_depth",),
        ("initiator_queue_depth",),
        ("max_receive_sge",),
        ("max_initiator_sge",),
        ("inline_data_size",),
        ("max_receive_sge", "max_initiator_sge", "inline_data_size"),
    ],
    ids=" ".join,
)
def test_f_1_2_each_limit_can_be_had(adapter, keep, names):
    cq = keep(adapter.create_completion_queue(16))
    limits = {name: limit for name, limit in limits_of(adapter.info).items() if name in names}
    granted = keep(adapter.create_queue_pair(cq, **limits)).limits
    for name, limit in limits.items():
        assert getattr(granted, name) >= limit, name


def test_f_1_2_all_limits_at_once_are_refused_for_lack_of_memory_only(adapter, keep):
    """Verbs promises each limit, but not the memory for all of them together (ibv_create_qp(3))."""
    cq = keep(adapter.create_completion_queue(16))
    try:
        keep(adapter.create_queue_pair(cq, **limits_of(adapter.info)))
    except ndpy.InsufficientResourcesError as error:
        assert error.native != 0


def test_f_1_3_completion_queues_of_another_adapter_are_refused(adapter, keep, adapter_name):
    other = keep(ndpy.open_adapter(adapter_name))
    own, foreign = keep(adapter.create_completion_queue(16)), keep(other.create_completion_queue(16))
    for queues in ((foreign,), (own, foreign), (foreign, own)):
        with pytest.raises(ndpy.ForeignObjectError):
            adapter.create_queue_pair(*queues)


def test_f_1_4_one_completion_queue_serves_many_queue_pairs(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    cq = keep(adapter.create_completion_queue(64))
    pairs = [connect_ends(keep, adapter, create_end(keep, adapter), create_end(keep, adapter, cq=cq)) for _ in range(3)]
    inboxes = [memory(keep, adapter, 6) for _ in pairs]
    for number, pair in enumerate(pairs):
        pair.server.queue_pair.receive(inboxes[number], context=number)
    # Not in the order of the queue pairs.
    for number in (2, 0, 1):
        pair = pairs[number]
        pair.client.queue_pair.send(memory(keep, adapter, b"data %d" % number))
        (completion,) = succeed(cq)
        assert (completion.context, completion.nbytes) == (number, 6)
        assert completion.queue_pair is pair.server.queue_pair
        assert contents(inboxes[number]) == b"data %d" % number
    assert [contents(inbox) for inbox in inboxes] == [b"data 0", b"data 1", b"data 2"]


def test_f_1_4_receives_and_requests_report_to_their_own_queues(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client = create_end(keep, adapter)
    requests = keep(adapter.create_completion_queue(16))
    server = create_end(keep, adapter, initiator_cq=requests)
    assert server.queue_pair.limits.receive_queue_depth >= 16
    pair = connect_ends(keep, adapter, client, server)
    server.queue_pair.receive(memory(keep, adapter, 4), context=1)
    client.queue_pair.receive(memory(keep, adapter, 4), context=2)
    client.queue_pair.send(memory(keep, adapter, b"data"), context=3)
    assert contexts(succeed(pair.server.cq)) == [1]
    server.queue_pair.send(memory(keep, adapter, b"data"), context=4)
    assert contexts(succeed(requests)) == [4]
    assert pair.server.cq.poll() == []


def test_f_1_5_queue_depths_do_not_depend_on_the_completion_queue(adapter, keep):
    cq = keep(adapter.create_completion_queue(2))
    limits = keep(adapter.create_queue_pair(cq, receive_queue_depth=64, initiator_queue_depth=64)).limits
    assert (limits.receive_queue_depth, limits.initiator_queue_depth) == (64, 64)


def test_it_tells_whether_messages_are_written_in_order(adapter, keep):
    queue_pair = create_end(keep, adapter).queue_pair
    operations = (Operation.WRITE, Operation.RECEIVE, Operation.READ)
    if ndpy.Capability.DATA_IN_ORDER in adapter.info.capabilities:
        assert all(queue_pair.data_in_order(operation) in (True, False) for operation in operations)
        with pytest.raises(ValueError, match="SEND"):
            queue_pair.data_in_order(Operation.SEND)
    else:
        with pytest.raises(ndpy.UnsupportedError, match="DATA_IN_ORDER"):
            queue_pair.data_in_order()


def test_f_1_8_a_completion_queue_in_use_refuses_to_close(adapter, keep):
    end = create_end(keep, adapter)
    with pytest.raises(ndpy.DeviceBusyError, match="QueuePair"):
        end.cq.close()
    assert not end.cq.closed
    assert end.cq.poll() == []


def test_f_1_9_completions_lead_to_their_queue_pair_and_context(pair, keep):
    for end, context in ((pair.client, "mine"), (pair.server, None)):
        end.queue_pair.context = context
    pair.server.queue_pair.receive([], context=(1 << 64) - 1)
    pair.client.queue_pair.send([], context=0)
    (sent,), (received,) = succeed(pair.client.cq), succeed(pair.server.cq)
    assert (sent.queue_pair, sent.queue_pair.context, sent.context) == (pair.client.queue_pair, "mine", 0)
    assert (received.queue_pair, received.queue_pair.context) == (pair.server.queue_pair, None)
    assert received.context == (1 << 64) - 1


def test_f_1_10_completions_outlive_their_queue_pair(pair, keep):
    inboxes = [memory(keep, pair.adapter, 4) for _ in range(3)]
    for context, inbox in enumerate(inboxes):
        pair.server.queue_pair.receive(inbox, context=context)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"data"))
    succeed(pair.client.cq)
    wait_until(lambda: contents(inboxes[0]) == b"data", "the message arrives")
    pair.server.connector.close()
    pair.server.queue_pair.close()
    completions = take(pair.server.cq, 3)
    assert contexts(completions) == [0, 1, 2]
    assert statuses(completions) == [Status.SUCCESS, Status.CANCELED, Status.CANCELED]
    assert_quiet(pair.server.cq)


def test_h_8_9_closing_a_queue_pair_disconnects(pair, keep):
    pair.client.queue_pair.receive(memory(keep, pair.adapter, 4), context=1)
    pair.server.connector.close()
    pair.server.queue_pair.close()
    assert statuses(take(pair.client.cq)) == [Status.CANCELED]
    pair.client.connector.wait_disconnected(DEADLINE_S)


# ---- F.2: what posting answers ----


def test_f_2_2_posting_needs_a_connection(adapter, keep):
    end = create_end(keep, adapter)
    region = memory(keep, adapter, 16, Access.REMOTE_WRITE)
    remote = RemoteMemory(region.address, 16, 1)
    for post in (
        lambda: end.queue_pair.send(region),
        lambda: end.queue_pair.read(region, remote),
        lambda: end.queue_pair.write(region, remote),
    ):
        with pytest.raises(ndpy.NotConnectedError, match="connect"):
            post()
    assert issubclass(ndpy.NotConnectedError, ConnectionError)
    assert end.cq.poll() == []


def test_f_2_2_the_client_is_connected_only_after_complete_connect(adapter, keep):

    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    offer = ask(keep, adapter, client.queue_pair)
    accepting = offer.server.begin_accept(server.queue_pair)
    offer.connecting.result(DEADLINE_S)
    with pytest.raises(ndpy.NotConnectedError):
        client.queue_pair.send([])
    offer.complete(accepting)
    server.queue_pair.receive([])
    client.queue_pair.send([])
    succeed(client.cq)


def test_f_2_3_receives_can_be_posted_at_any_time(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    inboxes = [memory(keep, adapter, 8) for _ in range(2)]
    server.queue_pair.receive(inboxes[0], context=1)
    pair = connect_ends(keep, adapter, client, server)
    server.queue_pair.receive(inboxes[1], context=2)
    for data in (b"first", b"second"):
        client.queue_pair.send(memory(keep, adapter, data))
    assert contexts(succeed(pair.server.cq, 2)) == [1, 2]
    assert [contents(inbox) for inbox in inboxes] == [b"first\0\0\0", b"second\0\0"]


@pytest.mark.parametrize("who", ["own disconnect", "peer's disconnect"])
def test_f_2_4_after_the_connection_requests_complete_cancelled(pair, keep, who):
    first, second = pair.client.connector, pair.server.connector
    (first if who == "own disconnect" else second).disconnect(DEADLINE_S)
    first.wait_disconnected(DEADLINE_S)
    region = memory(keep, pair.adapter, 8)
    pair.client.queue_pair.receive(region, context=1)
    pair.client.queue_pair.send(region, context=2)
    pair.client.queue_pair.write(region, RemoteMemory(4096, 8, 1), context=3)
    completions = take(pair.client.cq, 3)
    assert sorted(contexts(completions)) == [1, 2, 3]
    assert statuses(completions) == [Status.CANCELED] * 3
    with pytest.raises(ndpy.CanceledError):
        completions[0].raise_for_status()


def test_f_2_5_a_full_receive_queue_refuses_and_loses_nothing(adapter, keep):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    client, server = create_end(keep, adapter), create_end(keep, adapter, receive_queue_depth=2)
    region = memory(keep, adapter, 16)
    server.queue_pair.receive(region[0:8], context=1)
    server.queue_pair.receive(region[8:16], context=2)
    with pytest.raises(ndpy.QueueFullError, match="2"):
        server.queue_pair.receive(region, context=3)
    pair = connect_ends(keep, adapter, client, server)
    client.queue_pair.send(memory(keep, adapter, b"one"))
    assert contexts(succeed(server.cq)) == [1]
    server.queue_pair.receive(region[0:8], context=4)
    for _ in range(2):
        client.queue_pair.send(memory(keep, adapter, b"two"))
    assert contexts(succeed(server.cq, 2)) == [2, 4]
    assert_quiet(pair.server.cq)


def test_f_2_5_a_full_initiator_queue_refuses_and_loses_nothing(pair_with, keep):
    pair = pair_with(initiator_queue_depth=3)
    owner = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, b"contents")
    with pytest.raises(ndpy.QueueFullError):
        for context in range(4):
            pair.client.queue_pair.write(local, remote, context=context)
    assert contexts(succeed(pair.client.cq, 3)) == [0, 1, 2]
    assert_quiet(pair.client.cq)
    pair.client.queue_pair.write(local, remote, context=5)
    assert contexts(succeed(pair.client.cq)) == [5]


def test_f_2_5_silent_requests_free_their_slots(pair_with, keep):
    pair = pair_with(initiator_queue_depth=4)
    owner = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, b"contents")
    deadline = time.monotonic() + DEADLINE_S
    posted = 0
    while posted < 50 and time.monotonic() < deadline:
        try:
            pair.client.queue_pair.write(local, remote, flags=Flags.SILENT_SUCCESS)
            posted += 1
        except ndpy.QueueFullError:
            assert pair.client.cq.poll() == []
    assert posted == 50
    assert_quiet(pair.client.cq)
    assert contents(owner) == b"contents"


def test_f_2_6_more_elements_than_the_adapter_has_are_refused(pair_with, keep):
    """The test exceeds the adapter's limit, because a provider may grant more than was asked for (F.1.6)."""
    pair = pair_with()
    info = pair.adapter.info
    region = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE)
    too_many = [region[0:1]] * (max(info.max_initiator_sge, info.max_receive_sge) + 1)
    remote = expose(keep, pair.server, region)
    room = RemoteMemory(remote.address, 1 << 20, remote.token)
    for post in (
        lambda: pair.client.queue_pair.send(too_many),
        lambda: pair.client.queue_pair.receive(too_many),
        lambda: pair.client.queue_pair.read(too_many, room),
        lambda: pair.client.queue_pair.write(too_many, room),
    ):
        with pytest.raises(ndpy.LimitExceededError):
            post()
    assert_quiet(pair.client.cq)
    assert_works(keep, pair)


def test_f_2_7_more_bytes_than_the_adapter_moves_are_refused(pair_with, keep):
    pair = pair_with(max_initiator_sge=2)
    limit = pair.adapter.info.max_transfer_length
    size = min(limit, 1 << 20)
    if limit >= 1 << 32:
        pytest.skip(f"the limit of {pair.adapter.info.name}, {limit} bytes, is beyond a request's 32-bit lengths")
    region = memory(keep, pair.adapter, size)
    long = ndpy.Sge(region, region.address, limit, region.local_token)
    for elements in ([long, region[0:1]], [long, long]):
        with pytest.raises(ndpy.LimitExceededError):
            pair.client.queue_pair.send(elements)
    assert_works(keep, pair)


def test_f_2_8_flags_that_the_operation_does_not_take_are_refused(pair, keep):
    region = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE | Access.REMOTE_READ)
    remote = expose(keep, pair.server, region)
    queue_pair = pair.client.queue_pair
    for post, wrong in (
        (lambda flags: queue_pair.send(region, flags=flags), 0x100),
        (lambda flags: queue_pair.write(region, remote, flags=flags), Flags.SOLICITED),
        (lambda flags: queue_pair.read(region, remote, flags=flags), Flags.SOLICITED),
        (lambda flags: queue_pair.read(region, remote, flags=flags), Flags.INLINE),
    ):
        with pytest.raises(ndpy.InvalidFlagsError):
            post(wrong)
    assert_quiet(pair.client.cq)


@pytest.mark.parametrize("context", [-1, 1 << 64])
def test_contexts_are_64_bits(pair, keep, context):
    region = memory(keep, pair.adapter, 8)
    for elements in (region, region[0:8], [region[0:4]]):
        with pytest.raises(ValueError, match="2\\*\\*64"):
            pair.client.queue_pair.receive(elements, context=context)
    with pytest.raises(TypeError):
        pair.client.queue_pair.receive(region, context="text")  # type: ignore[arg-type]
    assert_works(keep, pair)


def test_local_bytes_must_fit_the_remote_memory(pair_with, keep):
    pair = pair_with(max_initiator_sge=2)
    owner = memory(keep, pair.adapter, 8, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, 16, SINK)
    for elements in (local, local[0:9], [local[0:4], local[4:9]]):
        with pytest.raises(ndpy.ElementRangeError):
            pair.client.queue_pair.write(elements, remote)
        is_read = not isinstance(elements, list) or len(elements) <= pair.adapter.info.max_read_sge
        with pytest.raises(ndpy.ElementRangeError if is_read else ndpy.LimitExceededError):
            pair.client.queue_pair.read(elements, remote)
    assert_works(keep, pair)


def test_what_is_no_element_is_refused(pair, keep):
    for wrong in (b"bytes", bytearray(4), [b"bytes"], [1], 7):
        with pytest.raises(TypeError):
            pair.client.queue_pair.send(wrong)  # type: ignore[arg-type]
    assert_works(keep, pair)


# ---- F.3: the requests ----


def test_f_3_1_a_message_fills_the_elements_of_a_receive_in_order(pair_with, keep):
    pair = pair_with(max_receive_sge=2, max_initiator_sge=2)
    source = memory(keep, pair.adapter, b"ABCDEFGHIJKLMNOP")
    sink = memory(keep, pair.adapter, b"." * 32)
    pair.server.queue_pair.receive([sink[20:25], sink[0:16]], context=1)
    pair.client.queue_pair.send([source[8:16], source[0:4]], context=2)
    (received,) = succeed(pair.server.cq)
    assert (received.operation, received.nbytes) == (Operation.RECEIVE, 12)
    assert contents(sink) == b"NOPABCD" + b"." * 13 + b"IJKLM" + b"." * 7
    succeed(pair.client.cq)


def test_f_3_2_empty_messages(pair, keep):
    region = memory(keep, pair.adapter, b"untouched")
    pair.server.queue_pair.receive(region, context=1)
    pair.server.queue_pair.receive([], context=2)
    pair.client.queue_pair.send([])
    pair.client.queue_pair.send(region[0:0])
    for completion in succeed(pair.server.cq, 2):
        assert completion.nbytes == 0
    assert contents(region) == b"untouched"


def test_f_3_3_a_short_message_leaves_the_rest_alone(pair, keep):
    sink = memory(keep, pair.adapter, b"." * 16)
    pair.server.queue_pair.receive(sink)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"short"))
    (completion,) = succeed(pair.server.cq)
    assert completion.nbytes == 5
    assert contents(sink) == b"short" + b"." * 11


def test_f_3_4_a_message_longer_than_its_receive_ends_the_connection(pair, keep):
    sink = memory(keep, pair.adapter, b"." * 16)
    pair.server.queue_pair.receive(sink[0:8], context=1)
    pair.server.queue_pair.receive(sink[0:8], context=2)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"much too long"), context=3)
    first, second = take(pair.server.cq, 2)
    assert (first.context, first.status) == (1, Status.BUFFER_OVERFLOW)
    assert (second.context, second.status) == (2, Status.CANCELED)
    assert contents(sink)[8:] == b"." * 8
    pair.client.connector.wait_disconnected(DEADLINE_S)
    (sent,) = take(pair.client.cq)
    assert sent.context == 3
    if not has_quirk(pair.adapter, Quirk.IWARP_NO_ACKNOWLEDGEMENT):
        # Contract M.11 decides for DATA_OVERRUN. Where the responder's answer is not specific, the send ends with
        # REMOTE_ERROR, as the documentation suggests.
        assert sent.status in (Status.DATA_OVERRUN, Status.REMOTE_ERROR)


def test_f_3_5_a_send_without_a_receive_times_out(pair, keep):
    require_acknowledged_sends(pair.adapter)
    begin = time.monotonic()
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"anybody?"), context=1)
    (completion,) = take(pair.client.cq)
    assert time.monotonic() - begin < DEADLINE_S / 2
    assert (completion.context, completion.status) == (1, Status.IO_TIMEOUT)
    with pytest.raises(TimeoutError):
        completion.raise_for_status()
    assert pair.server.cq.poll() == []
    pair.client.queue_pair.send([], context=2)
    assert statuses(take(pair.client.cq)) == [Status.CANCELED]


def test_f_3_5_a_receive_posted_in_time_takes_the_message(pair, keep):
    require_acknowledged_sends(pair.adapter)
    sink = memory(keep, pair.adapter, 8)
    pair.client.queue_pair.send(memory(keep, pair.adapter, b"waiting!"))
    assert_quiet(pair.client.cq, 0.1)
    pair.server.queue_pair.receive(sink)
    succeed(pair.server.cq)
    succeed(pair.client.cq)
    assert contents(sink) == b"waiting!"


def test_f_3_7_reads_scatter_and_writes_gather_in_order(pair_with, keep):
    pair = pair_with(max_initiator_sge=3)
    if pair.adapter.info.max_read_sge < 3:
        pytest.skip(f"{pair.adapter.info.name} takes {pair.adapter.info.max_read_sge} elements in a read")
    owner = memory(keep, pair.adapter, b"0123456789abcdef", Access.REMOTE_READ | Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, b"." * 16, SINK)
    pair.client.queue_pair.read([local[8:10], local[0:3], local[15:16]], remote[4:], context=1)
    assert [completion.nbytes for completion in succeed(pair.client.cq)] == [6]
    assert contents(local) == b"678.....45.....9"
    pair.client.queue_pair.write([local[15:16], local[8:10], local[0:3]], remote, context=2)
    assert [completion.operation for completion in succeed(pair.client.cq)] == [Operation.WRITE]
    assert contents(owner) == b"9456786789abcdef"


@pytest.mark.parametrize("length", [1, 4096, 4097, 300_001])
def test_f_3_7_transfers_of_many_packets_are_exact(pair, keep, rng, length):
    data = rng.randbytes(length)
    owner = memory(keep, pair.adapter, length, Access.REMOTE_READ | Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, data, SINK)
    pair.client.queue_pair.write(local, remote)
    succeed(pair.client.cq)
    assert contents(owner) == data
    fill(local, bytes(length))
    pair.client.queue_pair.read(local, remote)
    (completion,) = succeed(pair.client.cq)
    assert completion.nbytes == length
    assert contents(local) == data


def test_f_3_8_writes_and_reads_raise_nothing_at_the_peer(pair, keep):
    owner = memory(keep, pair.adapter, 8, Access.REMOTE_READ | Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, b"contents", SINK)
    pair.client.queue_pair.write(local, remote)
    pair.client.queue_pair.read(local, remote)
    succeed(pair.client.cq, 2)
    assert_quiet(pair.server.cq)


def test_f_3_9_empty_reads_and_writes_succeed(pair, keep):
    """Nobody checks the token and the address (E.5.5). An empty read proves that the peer's adapter is alive."""
    local = memory(keep, pair.adapter, 8, SINK)
    nowhere = RemoteMemory(0, 0, 0)
    pair.client.queue_pair.read([], nowhere, context=1)
    pair.client.queue_pair.write([], nowhere, context=2)
    pair.client.queue_pair.write(local[0:0], nowhere, context=3)
    assert contexts(succeed(pair.client.cq, 3)) == [1, 2, 3]


def test_f_3_11_the_last_byte_of_a_write_is_written_last(pair, keep):
    require(pair.adapter, ndpy.Capability.IN_ORDER_DMA)
    size = 65536
    owner = memory(keep, pair.adapter, size, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, size)
    for round_number in range(1, 9):
        fill(local, bytes([round_number]) * size)
        pair.client.queue_pair.write(local, remote, flags=Flags.SILENT_SUCCESS)
        wait_until(lambda number=round_number: owner.buffer[size - 1] == number, "the last byte arrives")
        assert contents(owner) == bytes([round_number]) * size


def test_f_3_12_a_write_before_a_send_is_seen_with_the_receive(pair, keep):
    owner = memory(keep, pair.adapter, 65536, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, 65536)
    for number in range(1, 6):
        fill(local, bytes([number]) * 65536)
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.write(local, remote, flags=Flags.SILENT_SUCCESS)
        pair.client.queue_pair.send([])
        succeed(pair.server.cq)
        assert contents(owner) == bytes([number]) * 65536
        succeed(pair.client.cq)


def test_f_3_13_reads_beyond_the_read_limit_wait(pair, keep):
    owner = memory(keep, pair.adapter, 4096, Access.REMOTE_READ)
    remote = expose(keep, pair.server, owner)
    fill(owner, bytes(range(256)) * 16)
    local = memory(keep, pair.adapter, 4096, SINK)
    for number in range(16):
        part = slice(256 * number, 256 * (number + 1))
        pair.client.queue_pair.read(local[part], remote[part], context=number)
    assert contexts(succeed(pair.client.cq, 16)) == list(range(16))
    assert contents(local) == contents(owner)


# ---- F.4: flags ----


def test_f_4_1_silent_success_reports_nothing_but_failure(pair, keep):
    require_acknowledged_sends(pair.adapter)
    owner = memory(keep, pair.adapter, b"original", Access.REMOTE_READ)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, b"contents", SINK)
    pair.client.queue_pair.read(local, remote, context=1, flags=Flags.SILENT_SUCCESS)
    assert_quiet(pair.client.cq)
    pair.client.queue_pair.write(local, remote, context=2, flags=Flags.SILENT_SUCCESS)
    (completion,) = take(pair.client.cq)
    assert (completion.context, completion.status) == (2, Status.ACCESS_VIOLATION)


def test_f_4_1_cancelled_silent_requests_report(pair, keep):
    pair.server.connector.disconnect(DEADLINE_S)
    pair.client.connector.wait_disconnected(DEADLINE_S)
    pair.client.queue_pair.send([], context=3, flags=Flags.SILENT_SUCCESS)
    (completion,) = take(pair.client.cq)
    assert (completion.context, completion.status) == (3, Status.CANCELED)


def test_f_4_2_a_read_fence_waits_for_the_reads_before(pair, keep):
    """A fenced send comes after a read into the same buffer. The peer gets the bytes that were read."""
    size = 100_000
    owner = memory(keep, pair.adapter, bytes(range(250)) * 400, Access.REMOTE_READ)
    remote = expose(keep, pair.server, owner)
    local = memory(keep, pair.adapter, size, SINK)
    for _ in range(3):
        fill(local, bytes(size))
        inbox = memory(keep, pair.adapter, size)
        pair.server.queue_pair.receive(inbox)
        pair.client.queue_pair.read(local, remote, context=1)
        pair.client.queue_pair.send(local, context=2, flags=Flags.READ_FENCE)
        assert contexts(succeed(pair.client.cq, 2)) == [1, 2]
        succeed(pair.server.cq)
        assert contents(inbox) == contents(owner)


def test_f_4_4_inline_data_are_taken_during_the_call(pair_with, keep, adapter):
    require(adapter, ndpy.Capability.INLINE)
    size = min(adapter.info.max_inline_data_size, 64)
    pair = pair_with(inline_data_size=size)
    owner = memory(keep, adapter, size, Access.REMOTE_WRITE)
    remote = expose(keep, pair.server, owner)
    inbox = memory(keep, adapter, size)
    local = memory(keep, adapter, b"N" * size)
    pair.server.queue_pair.receive(inbox)
    pair.client.queue_pair.send(local, flags=Flags.INLINE)
    pair.client.queue_pair.write(local, remote, flags=Flags.INLINE)
    fill(local, b"X" * size)
    local.deregister()
    succeed(pair.client.cq, 2)
    succeed(pair.server.cq)
    assert contents(inbox) == contents(owner) == b"N" * size


def test_f_4_5_inline_data_need_not_be_registered(pair_with, keep, adapter):
    require(adapter, ndpy.Capability.INLINE)
    if adapter.info.max_inline_data_size < 16:
        pytest.skip(f"{adapter.info.name} has {adapter.info.max_inline_data_size} bytes of inline data")
    pair = pair_with(inline_data_size=16)
    inbox = memory(keep, adapter, 16)
    for data in (b"just bytes", bytearray(b"a bytearray"), memoryview(b"a view")):
        pair.server.queue_pair.receive(inbox)
        pair.client.queue_pair.send(data, flags=Flags.INLINE)  # type: ignore[arg-type]
        succeed(pair.client.cq)
        (completion,) = succeed(pair.server.cq)
        assert contents(inbox)[: completion.nbytes] == bytes(data)


def test_f_4_6_more_than_the_inline_size_is_refused(pair_with, keep, adapter):
    require(adapter, ndpy.Capability.INLINE)
    pair = pair_with(inline_data_size=8)
    granted = pair.client.queue_pair.limits.inline_data_size
    assert granted >= 8
    region = memory(keep, adapter, granted + 1)
    with pytest.raises(ndpy.LimitExceededError):
        pair.client.queue_pair.send(region, flags=Flags.INLINE)
    assert_works(keep, pair)


def test_inline_data_are_refused_where_there_are_none(pair, keep):
    if ndpy.Capability.INLINE in pair.adapter.info.capabilities:
        pytest.skip(f"{pair.adapter.info.name} claims INLINE")
    remote = expose(keep, pair.server, memory(keep, pair.adapter, 8, Access.REMOTE_WRITE))
    local = memory(keep, pair.adapter, b"contents")
    for elements in (local, local[0:1], [], b"just bytes"):
        for post in (
            lambda elements=elements: pair.client.queue_pair.send(elements, flags=Flags.INLINE),
            lambda elements=elements: pair.client.queue_pair.write(elements, remote[0:8], flags=Flags.INLINE),
        ):
            with pytest.raises((ndpy.UnsupportedError, ndpy.ElementRangeError)):
                post()
    assert_quiet(pair.client.cq)
    assert_works(keep, pair)


def test_f_4_7_a_wrong_local_token_is_a_violation(pair, keep):
    region = memory(keep, pair.adapter, b"contents")
    forged = ndpy.Sge(region, region.address, 8, region.local_token ^ 0x5A00)
    pair.server.queue_pair.receive(memory(keep, pair.adapter, 8))
    pair.client.queue_pair.send(forged, context=1)
    (completion,) = take(pair.client.cq)
    assert (completion.context, completion.status) == (1, Status.ACCESS_VIOLATION)


def test_where_only_connectors_connect_endpoints_are_refused(adapter, keep):
    if ndpy.Capability.GIDS in adapter.info.capabilities and not has_quirk(adapter, Quirk.IWARP_MANAGER_ONLY):
        pytest.skip(f"{adapter.info.name} connects by endpoints too")
    queue_pair = create_end(keep, adapter).queue_pair
    peer = ndpy.Endpoint(lid=0, qp_number=1, psn=0, gid=bytes(16))
    for call in (queue_pair.local_endpoint, lambda: queue_pair.connect_endpoint(peer)):
        with pytest.raises(ndpy.UnsupportedError, match="connect"):
            call()
    queue_pair.close()
    with pytest.raises(ndpy.ClosedError):
        queue_pair.local_endpoint()
