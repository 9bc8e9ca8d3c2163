"""Section G of the contract: completion queues, notifications, shared receive queues."""

from __future__ import annotations

import threading
import time

import pytest
from conftest import share
from consumer import (
    DEADLINE_S,
    Port,
    Side,
    establish,
    get_results,
    make_pair,
    no_completion,
    pointer,
    sges,
    take,
    wait_until,
)
from kit.threads import beside
from version2 import NOTIFY_ANY, NOTIFY_ERRORS, NOTIFY_SOLICITED, NULL, Kind, Op, Status, ffi, kernel32


class CompletionGenerator:
    """A queue pair that was never connected. A Receive and a Flush create a completion whenever a test needs one."""

    def __init__(self, node, cq, context=0):
        self.cq, self.qp, self.number = cq, node.qp(cq, context=context), 0

    def add(self, count=1):
        for _ in range(count):
            assert self.qp.Receive(pointer(self.number), NULL, 0) == Status.SUCCESS
            self.number += 1
        assert self.qp.Flush() == Status.SUCCESS


@pytest.fixture
def generator(node):
    return CompletionGenerator(node, node.cq())


def notify(kit, cq, kind=NOTIFY_ANY):
    request = kit.issue(cq, "Notify", kind)
    assert request.returned in (Status.SUCCESS, Status.PENDING)
    return request


def message(pair, flags=0):
    active, passive = pair
    passive.receive(passive.region.sge(0, 8))
    active.send(active.region.sge(0, 8), flags=flags)


def stays_pending(request, seconds=0.2):
    return kernel32.WaitForSingleObject(request.event, int(seconds * 1000)) != 0 and request.pending()


# G.1 Creation and results


def test_g_1_1_depth_0_and_above_the_maximum_are_refused(node):
    for depth in (0, node.info.MaxCompletionQueueDepth + 1, 0xFFFFFFFF):
        assert node.try_create("CompletionQueue", node.file, depth, 0, 0) == (Status.INVALID_PARAMETER_3, None)


def test_g_1_2_m_13_the_maximum_itself_is_accepted(node):
    assert node.cq(node.info.MaxCompletionQueueDepth)
    assert node.cq(node.info.MaxCompletionQueueDepth)


@pytest.mark.parametrize(("group", "affinity"), [(0, 0), (0, 1), (0, (1 << 64) - 1), (0, 1 << 63)])
def test_g_1_3_an_affinity_is_a_preference(node, group, affinity):
    assert node.create("CompletionQueue", node.file, 4, group, affinity)
    assert node.create("SharedReceiveQueue", node.file, 4, 1, 0, group, affinity)


@pytest.mark.parametrize("kind", ["cq", "srq"])
def test_g_1_4_g_5_4_the_affinity_can_be_asked_for(node, kind):
    queue = node.cq() if kind == "cq" else node.srq()
    group, mask = ffi.new("uint16_t *"), ffi.new("uintptr_t *")
    code = queue.GetNotifyAffinity(group, mask)
    assert code in (Status.SUCCESS, Status.NOT_SUPPORTED)
    if code == Status.SUCCESS:
        assert mask[0] != 0
    assert queue.GetNotifyAffinity(NULL, mask) == Status.INVALID_PARAMETER
    assert queue.GetNotifyAffinity(group, NULL) == Status.INVALID_PARAMETER


def test_g_1_5_and_g_1_6_results_come_oldest_first_and_never_block(node):
    cq = node.cq(64)
    assert get_results(cq, 4) == []
    generator = CompletionGenerator(node, cq)
    generator.add(10)
    assert cq.GetResults(NULL, 0) == 0
    assert [d.context for d in get_results(cq, 4)] == [0, 1, 2, 3]
    assert [d.context for d in get_results(cq, 6)] == [4, 5, 6, 7, 8, 9]
    assert get_results(cq, 6) == []
    generator.add(3)
    assert [d.context for d in get_results(cq, 16)] == [10, 11, 12]


def test_g_1_7_entries_of_a_destroyed_queue_pair_stay(node):
    cq = node.cq()
    generator = CompletionGenerator(node, cq, context=0x77)
    generator.add(5)
    assert generator.qp.release() == 0
    assert [(d.context, d.queue_pair, d.status) for d in take(cq, 5)] == [(i, 0x77, Status.CANCELED) for i in range(5)]


def test_g_1_8_queue_pairs_interleave_and_each_keeps_its_order(node):
    cq = node.cq()
    generators = [CompletionGenerator(node, cq, context=i) for i in range(3)]
    for i in (0, 1, 2, 1, 0, 2, 2, 0):
        generators[i].add()
    done = take(cq, 8)
    for i in range(3):
        mine = [d.context for d in done if d.queue_pair == i]
        assert mine == sorted(mine)


def test_g_1_9_several_threads_never_get_an_entry_twice(node):
    cq = node.cq(4096)
    generator = CompletionGenerator(node, cq)
    total = share(20000, 4000)
    got, lock, ended = [], threading.Lock(), threading.Event()

    def collect():
        while True:
            finished = ended.is_set()
            new = [d.context for d in get_results(cq, 7)]
            with lock:
                got.extend(new)
            if finished and not new:
                return

    with beside(*4 * [collect], timeout_s=60):
        for _ in range(total // 50):
            generator.add(50)
            wait_until(lambda: len(got) > generator.number - 2000, "the collectors keep up")
        ended.set()
    assert sorted(got) == list(range(total))


# G.2 Notify


def test_g_2_1_nothing_is_notified_unless_asked(kit, node):
    file = node.new_file()
    port = Port(file)
    cq = node.cq(file=file)
    generator = CompletionGenerator(node, cq)
    generator.add(3)
    assert port.get(0.2) is None
    take(cq, 3)
    overlapped = kit.overlapped()
    assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    generator.add(3)
    assert port.get()[1] == overlapped
    assert port.get(0.2) is None, "armed once, notified once"
    port.close()


@pytest.mark.parametrize("kind", [3, 4, 0x80000000, 0xFFFFFFFF])
def test_g_2_2_other_types_are_refused(kit, node, kind):
    assert kit.issue(node.cq(), "Notify", kind).returned == Status.INVALID_PARAMETER_1


def test_g_2_2_errors_is_not_satisfied_by_completions(kit, generator):
    request = notify(kit, generator.cq, NOTIFY_ERRORS)
    generator.add(3)
    assert stays_pending(request)


def test_g_2_2_any_is_satisfied_by_any_completion(kit, pair):
    active, _ = pair
    request = notify(kit, active.cq)
    assert request.pending()
    message(pair)
    assert request.result() == Status.SUCCESS
    assert active.one().kind == Kind.SEND


@pytest.mark.parametrize("solicited", [False, True])
def test_g_2_2_f_4_3_solicited_is_satisfied_by_a_solicited_receive_only(kit, pair, solicited):
    active, passive = pair
    request = notify(kit, passive.cq, NOTIFY_SOLICITED)
    own = notify(kit, active.cq, NOTIFY_SOLICITED)
    for flags in (0, Op.SOLICIT if solicited else 0):
        message(pair, flags)
    assert [d.status for d in passive.take(2) + active.take(2)] == [Status.SUCCESS] * 4
    if solicited:
        assert request.result() == Status.SUCCESS
    else:
        assert stays_pending(request)
    assert stays_pending(own), "the sender's own completion is not solicited"


@pytest.mark.parametrize("size", [0, 8, 200_000])
def test_f_4_3_a_solicited_send_of_any_size(kit, size):
    active, passive = make_pair(kit, size=1 << 18)
    request = notify(kit, passive.cq, NOTIFY_SOLICITED)
    passive.receive(passive.region.sge())
    active.send(active.region.sge(0, size), flags=Op.SOLICIT)
    assert request.result() == Status.SUCCESS
    assert passive.one().bytes == size


@pytest.mark.parametrize("kind", [NOTIFY_ANY, NOTIFY_SOLICITED])
def test_g_2_3_an_error_satisfies_any_and_solicited(kit, kind, generator):
    request = notify(kit, generator.cq, kind)
    generator.add()
    assert request.result() == Status.SUCCESS


def test_g_2_4_m_19_the_next_event_completes_all_requests(kit, node):
    file = node.new_file()
    port = Port(file)
    cq = node.cq(file=file)
    generator = CompletionGenerator(node, cq)
    issued = [kit.overlapped() for _ in range(10)]
    for overlapped in issued:
        assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    generator.add()
    got = [port.get() for _ in range(10)]
    assert [packet[0] for packet in got] == [True] * 10
    assert sorted(int(ffi.cast("uintptr_t", packet[1])) for packet in got) == sorted(
        int(ffi.cast("uintptr_t", overlapped)) for overlapped in issued
    )
    assert port.get(0.1) is None
    port.close()


def test_g_2_5_a_completion_that_notified_does_not_notify_again(kit, generator):
    request = notify(kit, generator.cq)
    generator.add()
    assert request.result() == Status.SUCCESS
    again = notify(kit, generator.cq)
    assert stays_pending(again)
    generator.add()
    assert again.result() == Status.SUCCESS
    assert len(take(generator.cq, 2)) == 2


def test_g_2_6_any_raises_what_is_armed(kit, pair):
    _, passive = pair
    solicited = [notify(kit, passive.cq, NOTIFY_SOLICITED) for _ in range(2)]
    any_kind = notify(kit, passive.cq, NOTIFY_ANY)
    message(pair)
    assert [r.result() for r in [*solicited, any_kind]] == [Status.SUCCESS] * 3


def test_g_2_6_solicited_does_not_lower_any(kit, pair):
    _, passive = pair
    requests = [notify(kit, passive.cq, NOTIFY_ANY), notify(kit, passive.cq, NOTIFY_SOLICITED)]
    message(pair)
    assert [r.result() for r in requests] == [Status.SUCCESS] * 2


def test_g_2_7_no_wakeup_is_lost_between_draining_and_notify(kit, generator):
    for _ in range(20):
        assert get_results(generator.cq, 4) == []
        generator.add()
        request = notify(kit, generator.cq)
        assert request.result() == Status.SUCCESS
        assert len(get_results(generator.cq, 4)) == 1


def test_g_2_7_solicited_looks_at_unfetched_solicited_entries_only(kit, pair):
    active, passive = pair
    message(pair)
    assert active.one().status == Status.SUCCESS
    request = notify(kit, passive.cq, NOTIFY_SOLICITED)
    assert stays_pending(request)
    passive.cq.CancelOverlappedRequests()
    message(pair, Op.SOLICIT)
    assert active.one().status == Status.SUCCESS
    assert notify(kit, passive.cq, NOTIFY_SOLICITED).result() == Status.SUCCESS


def test_g_2_8_the_sequence(kit, generator):
    request = notify(kit, generator.cq)
    for _ in range(3):
        assert request.pending()
        generator.add()
        assert request.result() == Status.SUCCESS
        assert len(get_results(generator.cq, 1)) == 1
        assert get_results(generator.cq, 1) == []
        request = notify(kit, generator.cq)
        assert stays_pending(request, 0.05)


def test_g_2_9_fetched_entries_never_notify(kit, node):
    cq = node.cq()
    CompletionGenerator(node, cq).add(3)
    take(cq, 3)
    assert stays_pending(notify(kit, cq))


def test_g_2_10_cancelled_and_destroyed(kit, node):
    cq = node.cq()
    request = notify(kit, cq)
    cq.CancelOverlappedRequests()
    assert request.result() == Status.CANCELED
    request = notify(kit, cq)
    assert cq.release() == 0
    assert kernel32.WaitForSingleObject(request.event, 10000) == 0
    assert node.cq().GetOverlappedResult(request.overlapped, 0) == Status.CANCELED


def test_g_2_11_notify_again_with_the_same_structure_from_its_own_handling(kit, pair):
    active, passive = pair
    file = passive.node.new_file()
    port = Port(file)
    cq = passive.node.cq(file=file)
    a, b = Side(active.node, 3), Side(passive.node, 4, cq=cq)
    establish(a, b)
    overlapped = kit.overlapped()
    assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    for i in range(100):
        b.receive(b.region.sge(0, 8), context=i)
        a.send_when_free(a.region.sge(0, 8), flags=Op.SILENT_SUCCESS)
        end = time.monotonic() + DEADLINE_S
        got = []
        while not got:
            packet = port.get(end - time.monotonic())
            assert packet[:2] == (True, overlapped)
            got = get_results(cq, 4)
            assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
        assert [d.context for d in got] == [i]
    port.close()


def test_g_2_7_waiting_by_notification_alone_loses_nothing(kit, pair):
    active, passive = pair
    total = share(5000, 500)
    expected = 0
    posted = 0
    event = kit.event(manual=False)
    overlapped = kit.overlapped(event)
    for sent in range(total):
        if posted == expected:
            for _ in range(32):
                passive.receive(passive.region.sge(0, 8), context=posted)
                posted += 1
        active.send_when_free(active.region.sge(0, 8), flags=Op.SILENT_SUCCESS)
        while expected <= sent:
            got = get_results(passive.cq, 8)
            if got:
                assert [d.context for d in got] == list(range(expected, expected + len(got)))
                expected += len(got)
                continue
            assert passive.cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
            if kernel32.WaitForSingleObject(event, 10000) != 0:
                state = (
                    passive.cq.GetOverlappedResult(overlapped, 0),
                    get_results(passive.cq, 8),
                    get_results(active.cq, 8),
                )
                pytest.fail(f"wake-up {sent} was lost: {state}")


# G.3 Overrun


def test_g_3_1_a_full_queue_is_dead(kit):
    node = kit.node()
    cq = node.cq(4)
    active, passive = Side(node, 1, cq=cq), Side(kit.node(), 2)
    establish(active, passive)
    before = notify(kit, cq, NOTIFY_ERRORS)
    gone = kit.issue(passive.connector, "NotifyDisconnect")
    generator = CompletionGenerator(node, cq)
    generator.add(60)
    assert before.result() == Status.BUFFER_OVERFLOW
    kept = get_results(cq, 64)
    assert 4 <= len(kept) < 60
    assert [d.context for d in kept] == list(range(len(kept))), "G.3.3: what was queued before is retrievable"
    generator.add(1)
    assert get_results(cq, 4) == [], "no further completions appear"
    for kind in (NOTIFY_ANY, NOTIFY_ERRORS, NOTIFY_SOLICITED):
        assert notify(kit, cq, kind).result() == Status.BUFFER_OVERFLOW
    assert gone.result() == Status.SUCCESS, "the connections of its queue pairs are torn down"


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 100])
def test_g_3_2_m_9_there_is_room_for_more_than_asked_for(node, depth):
    cq = node.cq(depth)
    generator = CompletionGenerator(node, cq)
    for _ in range(depth):
        generator.add()
    assert len(get_results(cq, depth + 8)) == depth


def test_g_3_2_the_queue_goes_round_for_ever(node):
    cq = node.cq(3)
    generator = CompletionGenerator(node, cq)
    expected = 0
    for i in range(200):
        generator.add(i % 3 + 1)
        for done in take(cq, i % 3 + 1):
            assert done.context == expected
            expected += 1


# G.4 Resize


def test_g_4_1_resizing_loses_nothing_and_keeps_the_order(kit, pair):
    active, passive = pair
    depth = 256
    expected = 0
    for i in range(share(2000, 300)):
        passive.receive(passive.region.sge(0, 8), context=i)
        active.send_when_free(active.region.sge(0, 8), flags=Op.SILENT_SUCCESS)
        if i % 3 == 0:
            depth = {256: 1024, 1024: 64, 64: 256}[depth]
            assert passive.cq.Resize(depth) == Status.SUCCESS
        if i % 5 == 4:
            for done in passive.take(5):
                assert (done.context, done.status) == (expected, Status.SUCCESS)
                expected += 1


def test_g_4_1_an_armed_notification_survives(kit, node):
    cq = node.cq(8)
    generator = CompletionGenerator(node, cq)
    request = notify(kit, cq)
    assert cq.Resize(64) == Status.SUCCESS
    assert cq.Resize(4) == Status.SUCCESS
    assert request.pending()
    generator.add()
    assert request.result() == Status.SUCCESS


def test_g_4_1_growing_makes_room(node):
    cq = node.cq(2)
    assert cq.Resize(500) == Status.SUCCESS
    CompletionGenerator(node, cq).qp.release()
    generator = CompletionGenerator(node, cq)
    for _ in range(10):
        generator.add(50)
    assert [d.context for d in take(cq, 500)] == list(range(500))


def test_g_4_2_fewer_than_queued_is_refused(node):
    cq = node.cq(64)
    CompletionGenerator(node, cq).add(20)
    for depth in (1, 10, 19):
        assert cq.Resize(depth) == Status.BUFFER_OVERFLOW
    assert cq.Resize(20) == Status.SUCCESS
    assert [d.context for d in get_results(cq, 64)] == list(range(20))
    assert cq.Resize(1) == Status.SUCCESS


def test_g_4_3_0_and_above_the_maximum_are_refused(node):
    cq = node.cq()
    for depth in (0, node.info.MaxCompletionQueueDepth + 1, 0xFFFFFFFF):
        assert cq.Resize(depth) == Status.INVALID_PARAMETER
    assert cq.Resize(node.info.MaxCompletionQueueDepth) == Status.SUCCESS


def test_g_4_4_the_flag_says_that_resize_works(node):
    assert node.info.AdapterFlags & 0x100
    assert node.cq(4).Resize(8) == Status.SUCCESS


# G.5 and G.6 Shared receive queues


def shared(kit, count=2, **srq):
    """Return (srq, region, [(active, passive)...]); all passive sides use one shared receive queue."""
    node = kit.node()
    queue = node.srq(**srq)
    region = node.region()
    pairs = []
    for i in range(count):
        active, passive = Side(kit.node(), 10 + i), Side(node, 20 + i, srq=queue)
        establish(active, passive)
        pairs.append((active, passive))
    return queue, region, pairs


def post(queue, context, *elements):
    return queue.Receive(pointer(context), sges(*elements), len(elements))


def test_g_5_1_shared_queues_are_supported_as_the_limit_says(node):
    assert node.info.MaxSharedReceiveQueueDepth > 0
    assert node.srq()


def test_g_5_2_unsupported_depths_and_element_counts_are_refused(node):
    info = node.info
    for depth in (0, info.MaxSharedReceiveQueueDepth + 1):
        code, _ = node.try_create("SharedReceiveQueue", node.file, depth, 1, 0, 0, 0)
        assert code == Status.INVALID_PARAMETER_3
    code, _ = node.try_create("SharedReceiveQueue", node.file, 4, info.MaxReceiveSge + 1, 0, 0, 0)
    assert code == Status.INVALID_PARAMETER_4
    assert node.srq(info.MaxSharedReceiveQueueDepth, info.MaxReceiveSge)


def test_g_5_3_modify(kit, node):
    srq = node.srq(depth=16)
    for i in range(10):
        assert post(srq, i) == Status.SUCCESS
    assert srq.Modify(9, 0) == Status.BUFFER_OVERFLOW
    assert srq.Modify(node.info.MaxSharedReceiveQueueDepth + 1, 0) == Status.INVALID_PARAMETER
    assert srq.Modify(0, 0) == Status.SUCCESS
    assert srq.Modify(64, 0) == Status.SUCCESS
    for i in range(54):
        assert post(srq, i) == Status.SUCCESS
    assert srq.Modify(64, 0) == Status.SUCCESS
    assert srq.Modify(63, 0) == Status.BUFFER_OVERFLOW


def test_g_5_3_a_zero_depth_leaves_the_depth_and_sets_the_threshold(kit, node):
    srq = node.srq(depth=4, threshold=0)
    request = kit.issue(srq, "Notify")
    assert request.pending()
    assert srq.Modify(0, 2) == Status.SUCCESS
    srq.CancelOverlappedRequests()
    request.result()
    assert kit.do(srq, "Notify") == Status.SUCCESS
    for i in range(4):
        assert post(srq, i) == Status.SUCCESS
    assert post(srq, 9) == Status.NO_MORE_ENTRIES


def test_g_6_1_what_receive_refuses(node):
    srq = node.srq(depth=4, max_sge=4)
    region = node.region(64)
    assert post(srq, 0, *[region.sge(0, 1)] * (node.info.MaxReceiveSge + 1)) == Status.DATA_OVERRUN
    too_long = (region.address, node.info.MaxTransferLength, region.local)
    assert post(srq, 0, too_long, region.sge(0, 1)) == Status.BUFFER_OVERFLOW
    for i in range(4):
        assert post(srq, i) == Status.SUCCESS
    assert post(srq, 5) == Status.NO_MORE_ENTRIES


def test_g_6_2_the_oldest_entry_goes_to_whoever_receives(kit):
    srq, region, pairs = shared(kit, 3, depth=32)
    for i in range(6):
        post(srq, i, region.sge(i * 64, 64))
    for i, number in enumerate((2, 0, 0, 1, 2, 1)):
        active, passive = pairs[number]
        active.region.put(0, bytes([65 + i]) * 8)
        active.send(active.region.sge(0, 8))
        done = passive.one()
        assert (done.context, done.queue_pair, done.bytes) == (i, 20 + number, 8)
        assert region.get(i * 64, 9) == bytes([65 + i]) * 8 + b"\0"
        assert active.one().status == Status.SUCCESS
    assert all(no_completion(passive.cq) for _, passive in pairs)


def test_g_6_3_notify_completes_below_the_threshold(kit):
    srq, region, [(active, passive)] = shared(kit, 1, depth=16, threshold=3)
    for i in range(5):
        post(srq, i, region.sge(0, 64))
    requests = [kit.issue(srq, "Notify") for _ in range(3)]
    for left in (4, 3, 2):
        assert all(stays_pending(r, 0.05) for r in requests), f"{left + 1} are left"
        active.send(active.region.sge(0, 8))
        assert passive.one().status == active.one().status == Status.SUCCESS
    assert [r.result() for r in requests] == [Status.SUCCESS] * 3


def test_g_6_3_notify_with_too_few_completes_at_once_and_threshold_0_never(kit, node):
    assert kit.do(node.srq(threshold=1), "Notify") == Status.SUCCESS
    assert stays_pending(kit.issue(node.srq(threshold=0), "Notify"))


def test_g_6_4_cancelled_and_destroyed(kit, node):
    srq = node.srq()
    request = kit.issue(srq, "Notify")
    srq.CancelOverlappedRequests()
    assert request.result() == Status.CANCELED
    request = kit.issue(srq, "Notify")
    srq.release()
    assert kernel32.WaitForSingleObject(request.event, 10000) == 0
    assert node.cq().GetOverlappedResult(request.overlapped, 0) == Status.CANCELED


def test_g_6_5_a_receive_too_small_hurts_one_connection_only(kit):
    srq, region, [(a, b), (c, d)] = shared(kit, 2)
    post(srq, 1, region.sge(0, 4))
    post(srq, 2, region.sge(64, 64))
    a.send(a.region.sge(0, 8), context=5)
    done = b.one()
    assert (done.status, done.context) == (Status.BUFFER_OVERFLOW, 1)
    assert a.one().status == Status.DATA_OVERRUN
    c.send(c.region.sge(0, 8))
    assert (d.one().context, c.one().status) == (2, Status.SUCCESS)


def test_g_6_6_receive_on_such_a_queue_pair_is_refused(kit):
    _, _, [(_, passive)] = shared(kit, 1)
    assert passive.try_receive(passive.region.sge(0, 8)) == Status.INVALID_DEVICE_REQUEST


def test_g_6_7_an_empty_shared_queue_stalls_without_limit(kit):
    srq, region, [(a, b), (c, d)] = shared(kit, 2)
    for i in range(3):
        a.region.put(i, bytes([65 + i]))
        a.send(a.region.sge(i, 1), context=i)
    c.send(c.region.sge(0, 1), context=7)
    time.sleep(5.5)  # longer than a Send may wait for a Receive without a shared queue (F.3.5)
    assert no_completion(a.cq)
    assert no_completion(c.cq)
    for i in range(4):
        post(srq, i, region.sge(i * 8, 8))
    assert [x.status for x in b.take(3)] == [Status.SUCCESS] * 3
    assert d.one().status == Status.SUCCESS
    assert [(x.status, x.context) for x in a.take(3)] == [(Status.SUCCESS, i) for i in range(3)]
    assert c.one().context == 7
    letters = [region.get(i * 8, 1) for i in range(4)]
    assert [x for x in letters if x in (b"A", b"B", b"C")] == [b"A", b"B", b"C"]


@pytest.mark.parametrize("how", ["disconnect", "flush", "release"])
def test_g_6_8_the_end_of_one_queue_pair_leaves_the_waiting_receives(kit, how):
    srq, region, [(a, b), (c, d)] = shared(kit, 2)
    for i in range(3):
        post(srq, i, region.sge(i * 8, 8))
    if how == "disconnect":
        assert b.disconnect() == Status.SUCCESS
    elif how == "flush":
        assert b.qp.Flush() == Status.SUCCESS
    else:
        b.qp.release()
    a.receive(context=1)
    for i in range(3):
        c.send(c.region.sge(0, 4))
        assert (d.one().context, c.one().status) == (i, Status.SUCCESS)
    assert no_completion(b.cq)


def test_g_6_8_the_last_release_drops_waiting_receives_silently(kit):
    srq, region, [(_, passive)] = shared(kit, 1)
    for i in range(3):
        post(srq, i, region.sge(0, 8))
    passive.disconnect()
    passive.qp.release()
    assert srq.release() == 0
    assert no_completion(passive.cq)
