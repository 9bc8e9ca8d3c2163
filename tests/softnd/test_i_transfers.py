"""Version 1: data transfer and how completions identify requests (sections I.4 and I.5)."""

from __future__ import annotations

import contextlib
import socket
import time

import consumer
import consumer_version1
import iwarp
import pytest
import version1
import version2
from conftest import share
from consumer import Memory, get_results, used_bytes, wait_until
from consumer_version1 import (
    UNTOUCHED,
    Node,
    Side,
    address_of,
    connect,
    descriptor,
    do,
    endpoint,
    establish,
    fields,
    issue,
    make_pair,
    result_of,
    sgl,
)
from iwarp import Rights, Startup
from kit.threads import Elsewhere, beside
from version2 import NOTIFY_ANY, NOTIFY_ERRORS, NOTIFY_SOLICITED, NULL, Kind, Op, Status, ffi

REPLY = Startup(reply=True, ird=16, ord=16, peer_to_peer=True, rtr=iwarp.Rtr.READ)


@contextlib.contextmanager
def foreign_peer(side):
    """The other end of a side's connection: iwarp.py in this process, as server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connecting = connect(side, listener.getsockname()[:2])
        with iwarp.Endpoint(listener.accept()[0]) as peer:
            peer.await_start()
            peer.answer(REPLY)
            assert connecting.result() == Status.SUCCESS
            assert do(side.kit, side.connector, "CompleteConnect") == Status.SUCCESS
            yield peer


# ---- Read and Write ----


def test_i_4_1_read_and_write_go_by_descriptor_and_offset(kit, rng):
    active, passive = make_pair(kit)
    start, size = 100, 40000
    model = bytearray(rng.randbytes(passive.region.size))
    passive.region.put(0, bytes(model))
    _, _, remote = passive.bound_window(start, size)
    for _ in range(200):
        length = rng.choice((1, 8, 200, 237, 1000, 20000))
        offset, at = rng.randrange(size - length + 1), rng.randrange(active.region.size - 2 * length)
        if rng.random() < 0.5:
            data = rng.randbytes(length)
            active.region.put(at, data)
            active.expect(active.write(active.region.sge(at, length), remote=remote, offset=offset))
            model[start + offset : start + offset + length] = data
        else:
            cut = rng.randrange(length + 1)
            elements = (active.region.sge(at, cut), active.region.sge(at + length, length - cut))
            done = active.expect(active.read(*elements, remote=remote, offset=offset))
            assert done.bytes == length
            expected = bytes(model[start + offset : start + offset + length])
            assert active.region.get(at, cut) + active.region.get(at + length, length - cut) == expected
    assert passive.region.get() == bytes(model)


def test_i_4_1_the_range_must_lie_in_the_descriptor(kit):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window(0, 1000)
    before = passive.region.get()
    cases = [(0, 1001), (1, 1000), (999, 2), (1000, 1), (1001, 1), (1 << 63, 1), ((1 << 64) - 1, 2), ((1 << 64) - 1, 1)]
    for offset, size in cases:
        for post in (active.try_read, active.try_write):
            assert post(active.region.sge(0, size), remote=remote, offset=offset) == Status.ACCESS_VIOLATION
    base, _, token = fields(remote)
    wrapping = descriptor((1 << 64) - 8, 1000, token)
    assert active.try_write(active.region.sge(0, 16), remote=wrapping, offset=16) == Status.ACCESS_VIOLATION
    assert passive.region.get() == before
    active.region.put(0, bytes(range(100)))
    active.expect(active.write(active.region.sge(0, 100), remote=remote, offset=900))  # nothing was harmed
    assert passive.region.get(900, 100) == bytes(range(100))
    assert base == passive.region.address


@pytest.mark.parametrize("what", ["longer", "elsewhere", "token", "zero", "reversed"])
def test_i_4_1_a_descriptor_that_was_made_up_is_refused_by_the_peer(kit, what):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window(64, 1000)
    base, length, token = fields(remote)
    made_up = {
        "longer": (descriptor(base, length + 64, token), length),
        "elsewhere": (descriptor(base - 64, length, token), 0),
        "token": (descriptor(base, length, bytes([token[0] ^ 1, *token[1:]])), 0),
        "zero": (descriptor(base, length, bytes(4)), 0),
        "reversed": (descriptor(base, length, token[::-1]), 0),
    }
    wrong, offset = made_up[what]
    before = passive.region.get()
    active.expect(active.write(active.region.sge(0, 1), remote=wrong, offset=offset), Status.ACCESS_VIOLATION)
    assert passive.region.get() == before


def test_i_4_1_no_bytes_need_no_window(kit):
    active, passive = make_pair(kit)
    nothing = descriptor(0, 0, bytes(4))
    active.expect(active.read(remote=nothing))
    active.expect(active.write(remote=nothing, offset=1 << 60))
    assert passive.disconnect() == Status.SUCCESS


# ---- SendAndInvalidate ----


@pytest.mark.parametrize("size", [0, 100, 5000])
@pytest.mark.parametrize("solicit", [0, Op.SOLICIT])
def test_i_4_2_send_and_invalidate_ends_the_peers_window_and_tells_it(kit, size, solicit):
    active, passive = make_pair(kit)
    window, invalidated, remote = passive.bound_window(0, 64)
    active.expect(active.write(active.region.sge(0, 64), remote=remote))
    active.region.put(0, bytes(range(250)) * 20)
    received = passive.receive(passive.region.sge(1000, 5000))
    notified = issue(kit, passive.cq, "Notify", NOTIFY_SOLICITED)
    sent = active.send_and_invalidate(active.region.sge(0, size), remote=remote, flags=solicit)
    assert active.expect(sent).bytes == size
    # The window's result comes first, because a program that has seen the Receive may release the window.
    done = passive.take(2)
    assert [entry.address for entry in done] == [address_of(invalidated), address_of(received)]
    assert [entry.status for entry in done] == [Status.SUCCESS] * 2
    assert done[1].bytes == size
    assert passive.region.get(1000, size) == active.region.get(0, size)
    if solicit:
        assert notified.result() == Status.SUCCESS
    else:
        assert notified.pending()
    # The window is free again, for this endpoint and the same or another range.
    code, result, again = passive.try_bind(window, 64, 64)
    assert code == Status.SUCCESS
    passive.expect(result)
    active.expect(active.write(active.region.sge(0, 64), remote=again))
    active.expect(active.write(active.region.sge(0, 64), remote=remote), Status.ACCESS_VIOLATION)


def test_i_4_2_the_windows_result_is_used_each_time(kit):
    active, passive = make_pair(kit)
    window, invalidated = passive.node.window()
    for _ in range(20):
        code, result, remote = passive.try_bind(window)
        assert code == Status.SUCCESS
        passive.expect(result)
        invalidated.Status = UNTOUCHED
        received = passive.receive()
        active.expect(active.send_and_invalidate(remote=remote))
        passive.expect(invalidated)
        passive.expect(received)


def test_i_4_2_a_window_may_go_with_its_result_before_the_result_is_fetched(kit):
    active, passive = make_pair(kit)
    page = Memory(4096)
    place = ffi.cast("ND_RESULT *", page.address)
    window = passive.node.create("MemoryWindow", place)
    code, result, remote = passive.try_bind(window)
    assert code == Status.SUCCESS
    passive.expect(result)
    passive.receive()
    active.expect(active.send_and_invalidate(remote=remote))
    wait_until(lambda: place.Status == 0, "the window's result is written")
    assert window.release() == 0
    place.Status = UNTOUCHED  # the memory is used for something else now
    array = ffi.new("ND_RESULT *[2]")
    wait_until(lambda: passive.cq.GetResults(array, 1) == 1, "the window's result is reported")
    assert (address_of(array[0]), result_of(place)) == (page.address, UNTOUCHED)
    page.free()


@pytest.mark.parametrize("what", ["never bound", "of another endpoint", "already invalid", "made up"])
def test_i_4_2_a_window_that_the_peer_does_not_have_there(kit, what):
    active, passive = make_pair(kit)
    window, invalidated, remote = passive.bound_window(0, 64)
    token = fields(remote)[2]
    if what == "of another endpoint":
        second, own = Side(active.node), Side(passive.node)
        establish(second, own)
        active, passive = second, own
    elif what == "already invalid":
        result = passive.node.result()
        assert passive.endpoint.Invalidate(result, window.pointer, 0) == Status.SUCCESS
        passive.expect(result)
    elif what == "never bound":
        token = (
            version2.Interface("IND2MemoryWindow", passive.node.window()[0].pointer)
            .GetRemoteToken()
            .to_bytes(4, "little")
        )
    else:
        token = b"\xff" * 4
    received = passive.receive(passive.region.sge())
    sent = active.send_and_invalidate(active.region.sge(0, 8), remote=descriptor(0, 0, token))
    active.expect(sent, version1.INVALIDATION_ERROR)
    passive.expect(received, Status.INVALID_DEVICE_REQUEST)
    assert result_of(invalidated) == UNTOUCHED


def test_i_4_2_on_the_wire_it_is_iwarps_send_with_invalidate(kit):
    side = Side(Node(kit))
    with foreign_peer(side) as peer:
        memory = bytearray(256)
        stag = peer.expose(memory, Rights.READ | Rights.WRITE, base=0x10000)
        remote = descriptor(0x10000, 256, stag.to_bytes(4, "big"))
        side.region.put(0, b"for the window, and a message")
        side.write(side.region.sge(0, 14), remote=remote, offset=16)
        side.send_and_invalidate(side.region.sge(16, 13), remote=remote, flags=Op.SOLICIT)
        message = peer.receive()
        assert (message.data, message.solicited, message.invalidated) == (b"and a message", True, stag)
        assert bytes(memory[16:30]) == b"for the window"
        assert stag not in peer.regions
        side.send_and_invalidate(remote=descriptor(0, 0, b"\x01\x02\x03\x04"))
        assert peer.receive() == iwarp.Message(b"", False, 0x01020304)
        results = []
        peer.run_until(lambda: len(results) == 3 or results.extend(consumer_version1.get_results(side.cq, 1)))
        assert [done.status for done in results] == 3 * [Status.SUCCESS]


@pytest.mark.parametrize("solicited", [False, True])
def test_i_4_2_a_foreign_peer_invalidates(kit, solicited):
    side = Side(Node(kit))
    with foreign_peer(side) as peer:
        window, invalidated = side.node.window()
        code, result, made = side.try_bind(window, 0, 128)
        assert code == Status.SUCCESS
        side.expect(result)
        received = side.receive(side.region.sge(1000, 64))
        base, _, token = fields(made)
        stag = int.from_bytes(token, "big")
        peer.write(stag, base + 100, b"a foreign write")
        peer.send(b"done with it", solicited=solicited, invalidate=stag)
        side.expect(invalidated)
        assert side.expect(received).bytes == 12
        assert side.region.get(100, 15) == b"a foreign write"
        peer.write(stag, base, b"too late")
        peer.run_to_the_end()
        assert peer.terminated is not None
        assert peer.terminated.error in {(1, 1, 0), (0, 1, 0)}
        assert side.region.get(0, 8) != b"too late"


def test_i_4_2_the_window_of_a_version_2_program_becomes_invalid(kit):
    active, passive = Side(Node(kit)), consumer.Side(kit.node(), 0xB)
    establish(active, passive)
    window = passive.bound_window(0, 64)
    remote = descriptor(passive.region.address, 64, window.GetRemoteToken().to_bytes(4, "little"))
    active.expect(active.write(active.region.sge(0, 64), remote=remote))
    passive.receive(passive.region.sge(), context=7)
    active.expect(active.send_and_invalidate(active.region.sge(0, 8), remote=remote))
    done = passive.one()
    assert (done.kind, done.status, done.context, done.bytes) == (Kind.RECEIVE, Status.SUCCESS, 7, 8)
    passive.bind(passive.region, window, passive.region.address, 64)
    assert passive.one().status == Status.SUCCESS, "it can be bound again"
    assert not get_results(passive.cq, 1), "version 2 reports nothing for it"
    active.expect(active.write(active.region.sge(0, 64), remote=remote), Status.ACCESS_VIOLATION)


# ---- Inline data, flags, batches ----


@pytest.mark.parametrize("method", ["send", "write", "send_and_invalidate"])
def test_i_4_3_small_data_are_taken_during_the_call(kit, method):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window()
    limit = active.node.info.MaxInlineData
    out, granted = ffi.new("void **"), ffi.new("size_t *")
    cq = active.cq.pointer
    assert active.connector.CreateEndpoint(cq, cq, 1, 1, 1, 1, 0, 0, granted, out) == Status.SUCCESS
    version2.Interface("INDEndpoint", out[0]).release()
    assert 0 < granted[0] <= limit
    data = bytes(i % 251 for i in range(granted[0]))
    active.region.put(0, data)
    passive.receive(passive.region.sge())
    more = {} if method == "send" else {"remote": remote}
    active.endpoint.StartRequestBatch()  # so that it cannot be sent before the bytes change
    posted = getattr(active, method)(active.region.sge(0, granted[0]), **more)
    active.region.put(0, b"\xff" * len(data))
    active.endpoint.SubmitRequestBatch()
    active.expect(posted)
    assert passive.region.get(0, len(data)) == data


def test_i_4_3_handles_must_be_valid_for_small_data_too(kit):
    for size in (1, 200, 5000):
        active, passive = make_pair(kit)
        passive.receive(passive.region.sge())
        where = active.region.address
        active.expect(active.send((where, size, active.region.handle ^ 1 << 24)), Status.ACCESS_VIOLATION)


def test_i_4_3_there_is_no_inline_flag(kit):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window()
    element = active.region.sge(0, 8)
    assert active.try_send(element, flags=Op.INLINE) == Status.INVALID_PARAMETER_4
    assert active.try_write(element, remote=remote, flags=Op.INLINE) == Status.INVALID_PARAMETER_6
    assert active.try_read(element, remote=remote, flags=Op.INLINE) == Status.INVALID_PARAMETER_6
    call = (active.node.result(), sgl(element), 1, remote)
    assert active.endpoint.SendAndInvalidate(*call, Op.INLINE) == Status.INVALID_PARAMETER_5
    for flags in (Op.ALLOW_READ, Op.ALLOW_WRITE, 0x40, 1 << 31):
        assert active.try_send(element, flags=flags) == Status.INVALID_PARAMETER_4
        assert active.try_write(element, remote=remote, flags=flags) == Status.INVALID_PARAMETER_6
    assert active.try_read(element, remote=remote, flags=Op.SOLICIT) == Status.INVALID_PARAMETER_6


def test_i_4_4_a_fenced_send_takes_what_the_read_brought(kit, rng):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window(0, 8192)
    for i in range(50):
        size = rng.choice((1, 100, 236, 4000))  # small data would otherwise be copied during the call
        data = rng.randbytes(size)
        passive.region.put(0, data)
        active.region.put(0, b"\0" * size)
        passive.receive(passive.region.sge(16384, 8192))
        active.read(active.region.sge(0, size), remote=remote)
        active.send(active.region.sge(0, size), flags=Op.READ_FENCE)
        assert [done.status for done in active.take(2)] == [Status.SUCCESS] * 2
        assert passive.one().bytes == size
        assert passive.region.get(16384, size) == data, f"round {i}"


def test_i_4_4_silent_successes_never_come_back_and_failures_do(kit):
    active, passive = make_pair(kit)
    results = []
    for _ in range(30):
        passive.receive(passive.region.sge(0, 8))
        results.append(active.send(active.region.sge(0, 8), flags=Op.SILENT_SUCCESS))
    active.expect(active.read(remote=descriptor(0, 0, bytes(4))))
    passive.take(30)
    assert {result_of(result) for result in results} == {UNTOUCHED}
    failing = active.send((active.region.address, 8, 1), flags=Op.SILENT_SUCCESS)
    active.expect(failing, Status.ACCESS_VIOLATION)
    active.expect(active.send(flags=Op.SILENT_SUCCESS), Status.CANCELED)


def test_i_5_2_silent_success_leaks_nothing(kit):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window()
    result, array = active.node.result(), sgl(active.region.sge(0, 300))
    last = sgl(active.region.sge(0, 1))

    def run(count):
        for i in range(count):
            code = active.endpoint.Write(result, array, 1, remote, i % 100, Op.SILENT_SUCCESS)
            assert code == Status.SUCCESS
            if i % 32 == 31:
                assert active.endpoint.Write(result, last, 1, remote, 0, 0) == Status.SUCCESS
                active.one()

    run(2000)
    before = used_bytes()
    run(share(50_000, 8_000))
    assert used_bytes() - before < 1 << 20


def test_i_4_5_a_batch_goes_when_it_is_submitted_at_the_latest(kit):
    active, passive = make_pair(kit)
    for count in (0, 1, 5, 40):
        received = [passive.receive(passive.region.sge(0, 16)) for _ in range(count)]
        active.endpoint.StartRequestBatch()
        sent = [active.send(active.region.sge(0, 16)) for _ in range(count)]
        active.endpoint.SubmitRequestBatch()
        for result in sent:
            active.expect(result)
        for result in received:
            passive.expect(result)
    received = passive.receive()
    active.expect(active.send())  # a request outside a batch needs no Submit
    passive.expect(received)
    active.endpoint.SubmitRequestBatch()  # does nothing without a batch


def test_i_4_5_a_request_outside_of_a_batch_goes_at_once(kit):
    active, passive = make_pair(kit)
    received = [passive.receive() for _ in range(2)]
    time.sleep(0.4)  # the start-up has nothing left to do
    active.endpoint.StartRequestBatch()
    posted = Elsewhere(active.send).start().result()
    done = active.one(10)  # although this thread's batch is open
    assert done[:2] == (address_of(posted), Status.SUCCESS)
    passive.expect(received[0])
    mine = active.send()
    time.sleep(0.1)
    assert not consumer_version1.get_results(passive.cq, 1), "softnd holds a batch back"
    active.endpoint.SubmitRequestBatch()
    active.expect(mine)
    passive.expect(received[1])


def test_i_4_5_batches_of_several_threads_may_interleave(kit):
    active, passive = make_pair(kit, entries=512)
    rounds, threads = 12, 4
    for _ in range(2 * rounds * threads + rounds):
        passive.receive(passive.region.sge(0, 8))

    def batches():
        for _ in range(rounds):
            active.endpoint.StartRequestBatch()
            active.send(active.region.sge(0, 8), flags=Op.SILENT_SUCCESS)
            active.send(active.region.sge(0, 8), flags=Op.SILENT_SUCCESS)
            active.endpoint.SubmitRequestBatch()

    with beside(*threads * [batches]):
        active.endpoint.StartRequestBatch()
        with beside(lambda: [active.send(active.region.sge(0, 8)) for _ in range(rounds)]):
            pass
        active.take(rounds)
        active.endpoint.SubmitRequestBatch()
    assert len(passive.take(2 * rounds * threads + rounds)) == 2 * rounds * threads + rounds


def test_i_4_5_a_batch_that_is_never_submitted_is_flushed_like_any_request(kit):
    active, passive = make_pair(kit)
    active.endpoint.StartRequestBatch()
    held = [active.send() for _ in range(3)]
    assert active.disconnect() == Status.SUCCESS
    for result in held:
        active.expect(result, Status.CANCELED)
    assert passive.disconnect() == Status.SUCCESS


def test_i_4_6_lengths_beyond_the_adapters(kit):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window()
    huge = descriptor(0, (1 << 64) - 1, fields(remote)[2])
    limit = active.node.info.MaxOutboundLength
    for size in (limit + 1, 1 << 32, 1 << 40, (1 << 64) - 1):
        element = (active.region.address, size, active.region.handle)
        assert active.try_send(element) == version1.LOCAL_LENGTH
        assert active.try_read(element, remote=huge) == version1.LOCAL_LENGTH
        assert active.try_write(element, remote=huge) == version1.LOCAL_LENGTH
        assert active.endpoint.Receive(active.node.result(), sgl(element), 1).failed
    parts = [(active.region.address, limit // 2, active.region.handle)] * 3
    assert active.try_send(*parts) == version1.LOCAL_LENGTH
    many = [active.region.sge(0, 1)] * 17
    assert active.try_send(*many) == Status.DATA_OVERRUN, "F.2.6"
    five = [active.region.sge(0, 1)] * 5
    assert active.try_send(*five) == Status.DATA_OVERRUN, "more than the endpoint's"


def test_f_2_5_a_full_queue(kit):
    active, passive = make_pair(kit, entries=4)
    for _ in range(4):
        active.receive()
    assert active.endpoint.Receive(active.node.result(), NULL, 0) == Status.NO_MORE_ENTRIES
    active.endpoint.StartRequestBatch()
    for _ in range(4):
        active.send()
    assert active.try_send() == Status.NO_MORE_ENTRIES
    active.endpoint.SubmitRequestBatch()
    for _ in range(4):
        passive.receive()
    assert [done.status for done in active.take(4)] == [Status.SUCCESS] * 4


# ---- Completions ----


def test_i_5_1_results_are_the_pointers_that_were_posted(kit, rng):
    active, passive = make_pair(kit)
    _, _, remote = passive.bound_window()
    expected, received = [], []
    for i in range(60):
        size = rng.randrange(1, 2000)
        kind = rng.choice(("send", "read", "write"))
        if kind == "send":
            received.append((passive.receive(passive.region.sge(0, 2000)), size))
            expected.append((active.send(active.region.sge(0, size)), size))
        else:
            expected.append((getattr(active, kind)(active.region.sge(0, size), remote=remote), size))
        if i % 20 == 19:
            for side, wanted in ((active, expected), (passive, received)):
                done = side.take(len(wanted))
                assert [d.address for d in done] == [address_of(result) for result, _ in wanted], "in order (I.5.3)"
                assert [(d.status, d.bytes) for d in done] == [(Status.SUCCESS, size) for _, size in wanted]
                wanted.clear()


def test_i_5_1_a_result_is_written_when_it_is_fetched(kit):
    active, passive = make_pair(kit)
    received = passive.receive(passive.region.sge())
    sent = active.send(active.region.sge(0, 77))
    notified = issue(kit, passive.cq, "Notify", NOTIFY_ANY)
    assert notified.result() == Status.SUCCESS
    passive.expect(received)
    active.expect(sent)
    for result in (received, sent):
        assert (result_of(result), result.BytesTransferred) == (Status.SUCCESS, 77)


def test_i_5_1_results_and_the_array_may_be_missing(kit):
    active, passive = make_pair(kit)
    page = Memory(8192)
    results = [ffi.cast("ND_RESULT *", page.address + offset) for offset in (0, 16, 4096)]
    for result in results:
        assert passive.endpoint.Receive(result, NULL, 0) == Status.SUCCESS
        active.send()
    active.take(3)
    page.protect(version2.PAGE_NOACCESS, 0, 4096)
    wait_until(lambda: passive.cq.GetResults(ffi.cast("ND_RESULT **", 8), 4) == 0, "nothing is given")
    assert passive.cq.GetResults(NULL, 4) == 0
    array = ffi.new("ND_RESULT *[8]")
    found = []
    wait_until(lambda: found.extend(array[0 : passive.cq.GetResults(array, 8)]) or len(found) == 3, "nothing is lost")
    assert found == results, "the pointers identify the requests, although two results cannot be written"
    assert results[2].Status == 0
    page.free()
    for bad in (NULL, ffi.cast("ND_RESULT *", 8), ffi.cast("ND_RESULT *", page.address)):
        assert active.endpoint.Receive(bad, NULL, 0) == Status.INVALID_PARAMETER_1
        assert active.endpoint.Send(bad, NULL, 0, 0) == Status.INVALID_PARAMETER_1
        remote = descriptor(0, 0, bytes(4))
        assert active.endpoint.SendAndInvalidate(bad, NULL, 0, remote, 0) == Status.INVALID_PARAMETER_1
        assert active.endpoint.Read(bad, NULL, 0, remote, 0, 0) == Status.INVALID_PARAMETER_1
        assert active.endpoint.Write(bad, NULL, 0, remote, 0, 0) == Status.INVALID_PARAMETER_1


def test_pointers_that_lead_nowhere_are_refused(kit):
    active, passive = make_pair(kit)
    result, nowhere = active.node.result(), ffi.cast("ND_SGE *", 8)
    for bad in (NULL, nowhere):
        assert active.endpoint.Send(result, bad, 1, 0) == Status.ACCESS_VIOLATION
        assert active.endpoint.Receive(result, bad, 1) == Status.ACCESS_VIOLATION
    for bad in (NULL, ffi.cast("ND_MW_DESCRIPTOR *", 8)):
        assert active.endpoint.Read(result, NULL, 0, bad, 0, 0) == Status.INVALID_PARAMETER_4
        assert active.endpoint.Write(result, NULL, 0, bad, 0, 0) == Status.INVALID_PARAMETER_4
        assert active.endpoint.SendAndInvalidate(result, NULL, 0, bad, 0) == Status.INVALID_PARAMETER_4
    page = Memory(8192)
    kit.on_close(page.free)
    page.protect(version2.PAGE_NOACCESS, 4096, 4096)
    half = ffi.cast("ND_SGE *", page.address + 4096 - 24)
    assert active.endpoint.Send(result, half, 2, 0) == Status.ACCESS_VIOLATION
    assert result_of(result) == UNTOUCHED
    passive.receive()
    active.expect(active.send())


def test_handles_that_were_made_up_end_the_request_and_no_more(kit, rng):
    node, other = Node(kit), Node(kit)
    for _ in range(share(500, 40)):
        active, passive = Side(node, size=4096), Side(other, size=4096)
        establish(active, passive)
        handle = rng.choice((rng.getrandbits(64), rng.getrandbits(32), active.region.handle + (1 << 32), 0, 1))
        where = rng.choice((active.region.address, 8, (1 << 64) - 4096, active.region.address + 4000))
        passive.receive(passive.region.sge())
        done = active.send((where, rng.choice((1, 200, 4096)), handle))
        active.expect(done, Status.ACCESS_VIOLATION)
        for thing in (active.connector, active.endpoint, passive.connector, passive.endpoint):
            assert thing.release() == 0


def test_i_5_4_notifications(kit):
    active, passive = make_pair(kit)
    for bad in (3, 0xFFFFFFFF):
        assert issue(kit, passive.cq, "Notify", bad).returned == Status.INVALID_PARAMETER_1
    for _ in range(3):
        passive.receive()
    any_one, solicited, errors = (
        issue(kit, passive.cq, "Notify", kind) for kind in (NOTIFY_ANY, NOTIFY_SOLICITED, NOTIFY_ERRORS)
    )
    assert any_one.pending() and solicited.pending() and errors.pending()
    active.send()
    assert any_one.result() == solicited.result() == errors.result() == Status.SUCCESS, "G.2.4: all of them"
    passive.one()
    solicited = issue(kit, passive.cq, "Notify", NOTIFY_SOLICITED)
    active.send()
    active.take(2)
    passive.one()
    assert solicited.pending(), "nobody asked for an event"
    active.send(flags=Op.SOLICIT)
    assert solicited.result() == Status.SUCCESS
    passive.one()
    waiting = issue(kit, passive.cq, "Notify", NOTIFY_ANY)
    assert passive.cq.CancelOverlappedRequests() == Status.SUCCESS
    assert waiting.result() == Status.CANCELED
    waiting = issue(kit, passive.cq, "Notify", NOTIFY_ANY)
    passive.receive()
    assert passive.endpoint.Flush() == Status.SUCCESS
    assert waiting.result() == Status.SUCCESS
    assert passive.one().status == Status.CANCELED


def test_i_5_4_resize_takes_a_size(kit):
    node = Node(kit)
    cq, maximum = node.cq(4), node.info.MaxCqEntries
    for bad in (0, maximum + 1, 1 << 32, (1 << 64) - 1):
        assert cq.Resize(bad) == Status.INVALID_PARAMETER
    connector = node.connector()
    made = kit.own(endpoint(connector, cq, cq))
    results = [node.result() for _ in range(6)]
    assert cq.Resize(maximum) == Status.SUCCESS
    for result in results:
        assert made.Receive(result, NULL, 0) == Status.SUCCESS
    assert made.Flush() == Status.SUCCESS
    assert cq.Resize(5) == Status.BUFFER_OVERFLOW
    assert cq.Resize(6) == Status.SUCCESS
    done = consumer_version1.take(cq, 6)
    assert [(d.address, d.status) for d in done] == [(address_of(result), Status.CANCELED) for result in results]


def test_g_1_5_results_come_in_calls_of_any_size(kit):
    node = Node(kit)
    cq = node.cq(512)
    made = kit.own(endpoint(node.connector(), cq, cq, entries=300))
    results = [node.result() for _ in range(300)]
    for result in results:
        assert made.Receive(result, NULL, 0) == Status.SUCCESS
    made.Flush()
    found = []
    for count in (0, 1, 31, 32, 33, 64, 65, 200):
        found += consumer_version1.get_results(cq, count)
    assert [d.address for d in found] == [address_of(result) for result in results]


def test_f_3_5_a_send_that_finds_no_receive_times_out(kit):
    active, passive = make_pair(kit)
    start = time.monotonic()
    active.expect(active.send(active.region.sge(0, 8)), Status.IO_TIMEOUT)
    assert 1 < time.monotonic() - start < 5
    assert passive.disconnect() == Status.SUCCESS


def test_f_3_4_a_message_larger_than_the_receive(kit):
    active, passive = make_pair(kit)
    received = passive.receive(passive.region.sge(0, 10))
    active.expect(active.send(active.region.sge(0, 11)), Status.DATA_OVERRUN)
    passive.expect(received, Status.BUFFER_OVERFLOW)


def test_f_7_flush_cancels_what_was_posted(kit):
    active, passive = make_pair(kit)
    received = [active.receive() for _ in range(3)]
    assert active.endpoint.Flush() == Status.SUCCESS
    for result in received:
        active.expect(result, Status.CANCELED)
    active.expect(active.send(), Status.CANCELED)
    assert passive.disconnect() == Status.SUCCESS
