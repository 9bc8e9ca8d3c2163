"""Section C of the contract: overlapped files, requests, their results and their cancellation."""

from __future__ import annotations

import random
import time

import pytest
import version2
from conftest import share
from consumer import Memory, Port, accept, connect, get_address, make_pair, open_handles, pointer, wait_until
from kit.threads import Elsewhere
from version2 import NOTIFY_ANY, NULL, Mr, Status, ffi, kernel32


@pytest.fixture
def memory(kit):
    memory = Memory(65536)
    kit.on_close(memory.free)
    return memory


def register(kit, mr, memory, size=4096, flags=Mr.EVERYTHING):
    return kit.issue(mr, "Register", memory.pointer, size, flags)


def is_signalled(event):
    return kernel32.WaitForSingleObject(event, 0) == 0


def test_c_1_1_each_file_is_another_handle(node):
    handles = {int(ffi.cast("uintptr_t", node.new_file())) for _ in range(8)}
    assert len(handles) == 8
    assert not handles & {0, 0xFFFFFFFFFFFFFFFF}


def test_c_1_2_no_event_on_the_handle_and_no_packet_for_inline_success(node):
    # GetFileCompletionNotificationModes does not exist; NtQueryInformationFile class 41 returns the modes.
    ffi_nt = ffi.dlopen("ntdll.dll")
    ffi.cdef(
        "int32_t NtQueryInformationFile(void *, void *, void *, uint32_t, uint32_t);",
        override=True,
    )
    block, modes = ffi.new("uintptr_t[2]"), ffi.new("uint32_t *")
    if ffi_nt.NtQueryInformationFile(node.file, block, modes, 4, 41) < 0:
        pytest.skip("this Windows does not report the notification modes")
    assert modes[0] & 3 == 3


def test_c_1_3_the_handle_may_be_closed_before_everything_made_on_it(kit):
    node = kit.node()
    out = ffi.new("void **")
    assert node.adapter.CreateOverlappedFile(out) == Status.SUCCESS
    cq, mr = node.cq(file=out[0]), node.mr(file=out[0])
    connector, listener = node.connector(out[0]), node.listener(file=out[0])
    assert kernel32.CloseHandle(out[0])
    for thing in (listener, connector, mr, cq):
        assert thing.release() == 0
    assert not kernel32.CloseHandle(out[0]), "the provider closed a handle of its own under the same number"


def test_c_1_3_many_files_closed_by_the_caller_leave_no_handle(node):
    out = ffi.new("void **")

    def cycle(count):
        for _ in range(count):
            assert node.adapter.CreateOverlappedFile(out) == Status.SUCCESS
            assert kernel32.CloseHandle(out[0])

    cycle(20)
    before = open_handles()
    cycle(200)
    wait_until(lambda: open_handles() <= before + 8, "files closed by the caller are gone")


def test_c_1_4_and_c_1_5_each_object_reports_to_its_own_files_port(kit, node, memory):
    files = [node.new_file(), node.new_file()]
    ports = [Port(files[0], 0x1111), Port(files[1], 0xFFFF_FFFF_FFFF_0000)]
    for i in (1, 0):
        mr = node.mr(files[i])
        overlapped = kit.overlapped()
        assert mr.Register(memory.pointer, 4096, 0, overlapped) == Status.PENDING
        assert ports[i].get() == (True, overlapped, ports[i].key)
        assert ports[1 - i].get(0) is None
        assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
        kit.do(mr, "Deregister")
        assert ports[i].get() is not None
    for port in ports:
        port.close()


def test_c_1_6_the_port_may_come_after_the_objects_and_after_listen(kit, node):
    file = node.new_file()
    connector = node.connector(file)
    listener = node.listener(file=file)
    port = Port(file)
    overlapped = kit.overlapped()
    assert listener.GetConnectionRequest(version2.raw(connector), overlapped) == Status.PENDING
    assert port.get(0) is None
    active = node.bound_connector()
    qp = node.qp(node.cq())
    connect(kit, active, qp, get_address(listener, "GetLocalAddress"))
    assert port.get() == (True, overlapped, port.key)
    port.close()


def test_c_1_7_a_failure_packet_is_told_from_a_success_packet(kit, node):
    file = node.new_file()
    cq = node.cq(file=file)
    port = Port(file)
    overlapped = kit.overlapped()
    assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    assert cq.CancelOverlappedRequests() == Status.SUCCESS
    assert port.get() == (False, overlapped, port.key)
    assert cq.GetOverlappedResult(overlapped, 0) == Status.CANCELED
    port.close()


def test_c_2_2_exactly_one_notification_follows_a_pending_request(kit, node, memory):
    file = node.new_file()
    port = Port(file)
    mr = node.mr(file)
    for _ in range(50):
        for method, arguments in (("Register", (memory.pointer, 4096, 1)), ("Deregister", ())):
            overlapped = kit.overlapped()
            assert getattr(mr, method)(*arguments, overlapped) == Status.PENDING
            assert port.get()[:2] == (True, overlapped)
            assert port.get(0) is None
    port.close()


def test_c_2_3_nothing_follows_a_failure_of_the_call(kit, node):
    file = node.new_file()
    port = Port(file)
    mr = node.mr(file)
    event = kit.event()
    overlapped = kit.overlapped(event)
    code = mr.Deregister(overlapped)
    assert code.failed
    assert port.get(0.2) is None
    assert not is_signalled(event)
    port.close()


def test_c_2_4_m_3_every_asynchronous_method_pends(kit):
    active, passive = make_pair(kit)
    for request in (
        kit.issue(active.cq, "Notify", NOTIFY_ANY),
        kit.issue(active.connector, "NotifyDisconnect"),
        kit.issue(active.node.srq(threshold=4), "Notify"),
        kit.issue(active.connector, "Disconnect"),
        kit.issue(passive.connector, "Disconnect"),
        kit.issue(passive.region.mr, "Deregister"),
    ):
        assert request.returned == Status.PENDING, request.interface.name
    mr = active.node.mr()
    assert kit.issue(mr, "Register", pointer(active.region.address), 64, 0).returned == Status.PENDING


def test_c_2_5_a_null_overlapped_is_refused(kit, pair, memory):
    active, _ = pair
    node = active.node
    mr = node.mr()
    refused = Status.INVALID_PARAMETER
    assert mr.Register(memory.pointer, 4096, 0, NULL) == refused
    assert active.region.mr.Deregister(NULL) == refused
    assert active.cq.Notify(NOTIFY_ANY, NULL) == refused
    assert node.srq(threshold=1).Notify(NULL) == refused
    assert active.connector.NotifyDisconnect(NULL) == refused
    assert active.connector.Disconnect(NULL) == refused
    assert node.listener().GetConnectionRequest(node.connector().pointer, NULL) == refused
    for thing in (mr, active.cq, active.connector):
        assert thing.GetOverlappedResult(NULL, 0) == refused


def test_c_3_2_other_fields_may_be_garbage(kit, node, memory):
    mr = node.mr()
    event = kit.event()
    for fill in (0, 0xFF, 0x01, 0x80):
        overlapped = kit.overlapped()
        ffi.buffer(overlapped)[:] = bytes([fill]) * 32
        overlapped.hEvent = event
        assert mr.Register(memory.pointer, 4096, 0, overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 10000) == 0
        assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
        assert kit.do(mr, "Deregister") == Status.SUCCESS


@pytest.mark.parametrize("manual", [True, False])
def test_c_3_3_the_event_is_reset_on_acceptance_and_set_on_completion(kit, node, manual):
    cq = node.cq()
    event = kit.event(manual=manual, initial=True)
    overlapped = kit.overlapped(event)
    assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    assert not is_signalled(event)
    assert cq.CancelOverlappedRequests() == Status.SUCCESS
    assert kernel32.WaitForSingleObject(event, 10000) == 0
    assert is_signalled(event) == manual
    assert cq.GetOverlappedResult(overlapped, 0) == Status.CANCELED


def test_c_3_4_the_low_bit_of_the_event_keeps_the_packet_away(kit, node, memory):
    file = node.new_file()
    port = Port(file)
    mr, cq = node.mr(file), node.cq(file=file)
    event = kit.event()
    tagged = pointer(int(ffi.cast("uintptr_t", event)) | 1)
    overlapped = kit.overlapped(tagged)
    assert mr.Register(memory.pointer, 4096, 0, overlapped) == Status.PENDING
    assert kernel32.WaitForSingleObject(event, 10000) == 0
    assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
    overlapped = kit.overlapped(tagged)
    assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    cq.CancelOverlappedRequests()
    assert kernel32.WaitForSingleObject(event, 10000) == 0
    assert port.get(0.2) is None
    port.close()


def test_c_3_5_without_event_and_port_polling_finds_the_result(kit, node, memory):
    mr = node.mr()
    overlapped = kit.overlapped()
    assert mr.Register(memory.pointer, 4096, 0, overlapped) == Status.PENDING
    wait_until(lambda: mr.GetOverlappedResult(overlapped, 0) != Status.PENDING, "polling finds the result")
    assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS


def test_c_3_6_the_structure_may_be_reused_without_clearing(kit, node, memory):
    mr = node.mr()
    event = kit.event(manual=False)
    overlapped = kit.overlapped(event)
    for _ in range(100):
        assert mr.Register(memory.pointer, 4096, 1, overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 10000) == 0
        assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS
        assert mr.Deregister(overlapped) == Status.PENDING
        assert kernel32.WaitForSingleObject(event, 10000) == 0
        assert mr.GetOverlappedResult(overlapped, 0) == Status.SUCCESS


def test_c_3_7_win32_sees_the_completion_too(kit, node, memory):
    cq = node.cq()
    request = kit.issue(cq, "Notify", NOTIFY_ANY)
    size = ffi.new("uint32_t *")
    assert not kernel32.GetOverlappedResult(node.file, request.overlapped, size, 0)
    assert version2.last_error() == 996  # ERROR_IO_INCOMPLETE
    cq.CancelOverlappedRequests()
    request.result()
    assert not kernel32.GetOverlappedResult(node.file, request.overlapped, size, 0)
    assert version2.last_error() != 996
    mr = node.mr()
    request = register(kit, mr, memory)
    assert request.result() == Status.SUCCESS
    assert kernel32.GetOverlappedResult(node.file, request.overlapped, size, 0)


def test_c_3_8_disconnect_and_deregister_on_one_structure_then_release(kit):
    for _ in range(10):
        active, passive = make_pair(kit)
        overlapped = ffi.new("OVERLAPPED *")
        active.connector.Disconnect(overlapped)
        active.region.mr.Deregister(overlapped)
        for thing in (active.connector, active.qp, active.region.mr, active.cq):
            thing.release()
        pattern = b"\x3c" * 32
        ffi.buffer(overlapped)[:] = pattern
        passive.receive(context=1)
        assert passive.one().status == Status.CANCELED
        assert bytes(ffi.buffer(overlapped)) == pattern
        kit.kept.append(overlapped)


def test_c_4_1_a_running_request_is_pending(kit, node):
    cq = node.cq()
    request = kit.issue(cq, "Notify", NOTIFY_ANY)
    start = time.monotonic()
    for _ in range(10):
        assert cq.GetOverlappedResult(request.overlapped, 0) == Status.PENDING
    assert time.monotonic() - start < 5
    assert request.pending()


@pytest.mark.parametrize("with_event", [True, False])
def test_c_4_2_waiting_returns_only_when_the_request_completed(kit, node, with_event):
    cq = node.cq()
    overlapped = kit.overlapped(kit.event() if with_event else NULL)
    assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
    waiting = Elsewhere(lambda: cq.GetOverlappedResult(overlapped, 1)).start()
    time.sleep(0.3)
    assert not waiting.over
    cq.CancelOverlappedRequests()
    assert waiting.result() == Status.CANCELED


def test_c_4_6_the_result_can_be_asked_for_again(kit, node, memory):
    mr, cq = node.mr(), node.cq()
    done, cancelled = register(kit, mr, memory), kit.issue(cq, "Notify", NOTIFY_ANY)
    cq.CancelOverlappedRequests()
    assert (done.result(), cancelled.result()) == (Status.SUCCESS, Status.CANCELED)
    for wait in (0, 1, 0):
        assert mr.GetOverlappedResult(done.overlapped, wait) == Status.SUCCESS
        assert cq.GetOverlappedResult(cancelled.overlapped, wait) == Status.CANCELED


def test_c_4_7_several_threads_may_wait_on_one_interface(kit, node):
    cq = node.cq()
    requests = [kit.issue(cq, "Notify", NOTIFY_ANY) for _ in range(8)]
    waiting = [Elsewhere(lambda r=request: cq.GetOverlappedResult(r.overlapped, 1)).start() for request in requests]
    cq.CancelOverlappedRequests()
    assert [one.result() for one in waiting] == [Status.CANCELED] * 8


def test_c_4_8_the_status_is_found_through_the_structure(kit, node, memory):
    mine, other, cq = node.mr(), node.mr(), node.cq()
    request = register(kit, mine, memory)
    assert request.result() == Status.SUCCESS
    assert other.GetOverlappedResult(request.overlapped, 0) == Status.SUCCESS
    assert other.GetOverlappedResult(request.overlapped, 1) == Status.SUCCESS
    cancelled = kit.issue(cq, "Notify", NOTIFY_ANY)
    cq.CancelOverlappedRequests()
    assert cancelled.result() == Status.CANCELED
    assert other.GetOverlappedResult(cancelled.overlapped, 0) == Status.CANCELED


def test_c_5_1_cancel_ends_all_requests_of_this_object_and_of_no_other(kit, node):
    one, other = node.cq(), node.cq()
    mine = [kit.issue(one, "Notify", NOTIFY_ANY) for _ in range(5)]
    others = [kit.issue(other, "Notify", NOTIFY_ANY) for _ in range(5)]
    assert one.CancelOverlappedRequests() == Status.SUCCESS
    assert [request.result() for request in mine] == [Status.CANCELED] * 5
    assert all(request.pending() for request in others)


def test_c_5_2_cancel_with_nothing_running_changes_nothing(kit, node, memory):
    mr, cq = node.mr(), node.cq()
    request = register(kit, mr, memory)
    assert request.result() == Status.SUCCESS
    assert mr.CancelOverlappedRequests() == Status.SUCCESS
    assert cq.CancelOverlappedRequests() == Status.SUCCESS
    assert request.poll() == Status.SUCCESS
    assert kit.do(mr, "Deregister") == Status.SUCCESS


def test_c_5_3_m_4_the_packets_are_there_when_cancel_returns(kit, node):
    file = node.new_file()
    port = Port(file)
    cq, listener = node.cq(file=file), node.listener(file=file)
    for thing, method, arguments in (
        (cq, "Notify", lambda: (NOTIFY_ANY,)),
        (listener, "GetConnectionRequest", lambda: (node.connector().pointer,)),
    ):
        for _ in range(20):
            overlapped = kit.overlapped()
            assert getattr(thing, method)(*arguments(), overlapped) == Status.PENDING
            assert thing.CancelOverlappedRequests() == Status.SUCCESS
            assert port.get(0) == (False, overlapped, port.key)
    port.close()


def test_c_5_4_cancelled_requests_come_in_the_order_they_were_issued(kit, node):
    file = node.new_file()
    port = Port(file)
    queues = [node.cq(file=file), node.cq(file=file)]
    issued = {0: [], 1: []}
    for i in (0, 1, 1, 0, 1, 0, 0, 1):
        overlapped = kit.overlapped()
        assert queues[i].Notify(NOTIFY_ANY, overlapped) == Status.PENDING
        issued[i].append(overlapped)
    for queue in reversed(queues):
        queue.CancelOverlappedRequests()
    assert [port.get(0)[1] for _ in range(8)] == issued[1] + issued[0]
    port.close()


def test_c_5_5_a_cancelled_request_may_be_reissued_thousands_of_times(kit, node):
    file = node.new_file()
    port = Port(file)
    cq = node.cq(file=file)
    overlapped = kit.overlapped()
    for _ in range(share(5000, 1000)):
        assert cq.Notify(NOTIFY_ANY, overlapped) == Status.PENDING
        assert cq.CancelOverlappedRequests() == Status.SUCCESS
        assert port.get(0) == (False, overlapped, port.key)
    port.close()


def test_c_5_6_cancelling_a_connector_ends_its_connect(kit, node):
    listener = node.listener()
    connector, qp = node.bound_connector(), node.qp(node.cq())
    request = connect(kit, connector, qp, get_address(listener, "GetLocalAddress"))
    assert request.pending()
    assert connector.CancelOverlappedRequests() == Status.SUCCESS
    assert request.result() == Status.CANCELED


def test_c_5_6_cancelling_a_connector_ends_its_accept(kit, node):
    listener = node.listener()
    given = node.connector()
    arrived = kit.issue(listener, "GetConnectionRequest", given)
    connector, cq = node.bound_connector(), node.cq()
    connecting = connect(kit, connector, node.qp(cq), get_address(listener, "GetLocalAddress"))
    assert arrived.result() == Status.SUCCESS
    accepting = accept(kit, given, node.qp(cq))
    assert connecting.result() == Status.SUCCESS
    assert accepting.pending()
    assert given.CancelOverlappedRequests() == Status.SUCCESS
    assert accepting.result() == Status.CANCELED


def test_c_5_6_cancelling_a_connector_ends_notify_disconnect(kit, pair):
    active, _ = pair
    request = kit.issue(active.connector, "NotifyDisconnect")
    assert request.pending()
    assert active.connector.CancelOverlappedRequests() == Status.SUCCESS
    assert request.result() == Status.CANCELED


def test_c_5_6_cancelling_a_listener_ends_all_its_calls(kit, node):
    listener = node.listener()
    requests = [kit.issue(listener, "GetConnectionRequest", node.connector()) for _ in range(5)]
    assert listener.CancelOverlappedRequests() == Status.SUCCESS
    assert [request.result() for request in requests] == [Status.CANCELED] * 5


@pytest.mark.parametrize("kind", ["cq", "listener", "connect", "notify disconnect"])
def test_c_5_7_the_last_release_cancels_and_touches_nothing_later(kit, node, kind):
    if kind == "cq":
        thing = node.cq()
        request = kit.issue(thing, "Notify", NOTIFY_ANY)
    elif kind == "listener":
        thing = node.listener()
        request = kit.issue(thing, "GetConnectionRequest", node.connector())
    elif kind == "connect":
        listener, thing = node.listener(), node.bound_connector()
        request = connect(kit, thing, node.qp(node.cq()), get_address(listener, "GetLocalAddress"))
    else:
        active, _ = make_pair(kit)
        thing = active.connector
        request = kit.issue(thing, "NotifyDisconnect")
    assert request.pending()
    assert thing.release() == 0
    assert kernel32.WaitForSingleObject(request.event, 10000) == 0
    # Another object of the adapter can read the result from the structure (C.4.8).
    assert node.mr().GetOverlappedResult(request.overlapped, 0) == Status.CANCELED
    pattern = bytes(range(32))
    ffi.buffer(request.overlapped)[:] = pattern
    make_pair(kit)[0].disconnect()
    assert bytes(ffi.buffer(request.overlapped)) == pattern


def test_c_5_closing_and_cancelling_in_any_order(kit):
    rng = random.Random(7)
    for _ in range(share(100, 10)):
        active, passive = make_pair(kit)
        requests = [
            kit.issue(active.cq, "Notify", NOTIFY_ANY),
            kit.issue(active.connector, "NotifyDisconnect"),
            kit.issue(passive.connector, "NotifyDisconnect"),
        ]
        for _ in range(8):
            active.receive(active.region.sge(0, 64))
            passive.send(passive.region.sge(0, 64))
        things = [side_thing for side in (active, passive) for side_thing in (side.connector, side.qp, side.cq)]
        rng.shuffle(things)
        for thing in things:
            if rng.random() < 0.5 and thing.name != "IND2QueuePair":
                thing.CancelOverlappedRequests()
            assert thing.release() == 0 or thing.name == "IND2CompletionQueue"
        for request in requests:
            assert kernel32.WaitForSingleObject(request.event, 10000) == 0
