"""ndpy over a provider of version 1: contract section I, from the client's side.

tests/contract covers what both versions share. With NDPY_PROVIDER_VERSION=1 it runs over version 1. Each test here has
a private softnd and fails if an object or a handle is left (own_softnd.py).
"""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from kit.helpers import (
    DEADLINE_S,
    Keeper,
    ask,
    assert_works,
    bind,
    connect_pair,
    contents,
    contexts,
    create_end,
    establish,
    memory,
    rounds,
    sample,
    send_message,
    statuses,
    succeed,
    take,
    wait_until,
)
from kit.scenarios import slow_call, slow_completions
from kit.starting import create_process
from kit.threads import in_threads
from own_softnd import SOFTND, opened

import ndpy
from ndpy import Access, Flags, RemoteMemory, Status
from ndpy.objects import queue_pair as queue_pairs
from ndpy.platforms.networkdirect.native_calls import ffi, lib
from ndpy.platforms.networkdirect.provider_dll import Provider

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def version():
    return 1


def unused(softnd) -> bool:
    """Whether none of its adapters is open any more."""
    provider = Provider._loaded.get(str(softnd.path))
    return provider is None or provider._users == 0


# ---- I.1: the shape ----


def test_i_1_2_an_adapter_has_one_file(softnd):
    with opened(softnd) as (adapter, keep):
        assert (adapter.info.version, adapter.info.addresses) == (1, ("127.0.0.1",))
        for ask_for in (
            lambda: adapter.overlapped_file,
            lambda: adapter.create_completion_queue(8, overlapped_file=adapter.completion_port),
        ):
            with pytest.raises(ndpy.UnsupportedError, match="one file"):
                ask_for()
        assert adapter.completion_port
        cq = keep(adapter.create_completion_queue(8))
        with pytest.raises(ndpy.UnsupportedError):
            cq.notify()


def test_i_1_1_there_are_no_shared_receive_queues(softnd):
    with opened(softnd) as (adapter, _), pytest.raises(ndpy.UnsupportedError, match="shared receive"):
        adapter.create_shared_receive_queue(8)


# ---- I.2: registrations ----


def test_i_2_6_each_registration_has_its_own_handle(softnd):
    with opened(softnd, slow_call("reg_mr", 20)) as (adapter, keep):
        buffer = bytearray(4096)
        pendings = [adapter.begin_register(buffer) for _ in range(rounds(2000, 200))]
        regions = [keep(pending.result(DEADLINE_S)) for pending in pendings]
        assert len({region.local_token for region in regions}) == len(regions)
        pair = connect_pair(keep, adapter)
        for number, region in enumerate(regions[:: len(regions) // 10]):
            pair.server.queue_pair.receive(region[100 * number : 100 * number + 7])
            pair.client.queue_pair.send(memory(keep, adapter, b"by %04d" % number))
            succeed(pair.client.cq)
            succeed(pair.server.cq)
            assert buffer[100 * number : 100 * number + 7] == b"by %04d" % number


def test_i_2_2_the_handle_may_be_written_when_nobody_waits_any_more(softnd):
    """The provider writes the handle 60 ms later. Until then ndpy must not free the memory for it."""
    with opened(softnd, slow_call("reg_mr", 60)) as (adapter, _):
        for _ in range(rounds(20, 3)):
            for _ in range(50):
                adapter.begin_register(bytearray(64))
            gc.collect()
            # If the memory was freed, the allocator returns it here.
            junk = [lib.ndpy_request_new(number, ffi.NULL, 1) for number in range(50)]
            for request in junk:
                ffi.memmove(request, b"\xa5" * 40, 40)
            wait_until(lambda: not adapter._registering, "the registrations end")
            for request in junk:
                assert bytes(ffi.buffer(request, 40)) == b"\xa5" * 40
                lib.ndpy_request_drop(request)
            gc.collect()


def test_i_2_2_a_cancelled_registration_leaves_the_others_alone(softnd):
    """All of them are requests of one object, the adapter. Cancelling them there would cancel every one."""
    with opened(softnd, slow_call("reg_mr", 500)) as (adapter, keep):
        pendings = [adapter.begin_register(bytearray(64)) for _ in range(20)]
        for pending in pendings[::2]:
            assert pending.cancel()
        for pending in pendings[1::2]:
            keep(pending.result(DEADLINE_S))
        for pending in pendings[::2]:
            with pytest.raises(ndpy.CanceledError):
                pending.result(0)
        # If the provider completed some in spite of the cancel, ndpy has deregistered them. The fixture counts leaks.
        wait_until(lambda: not adapter._registering, "what was cancelled is gone")
        keep(adapter.register(bytearray(64), timeout_s=DEADLINE_S))


def test_i_2_2_a_registration_that_is_waited_for_too_short_goes(softnd):
    with opened(softnd, slow_call("reg_mr", 100)) as (adapter, keep):
        buffer = bytearray(64)
        with pytest.raises(ndpy.TimeoutError):
            adapter.register(buffer, timeout_s=0.01)
        wait_until(lambda: not adapter._registering, "what was cancelled is gone")
        buffer.append(0)
        assert keep(adapter.register(buffer)).length == 65


@pytest.mark.parametrize("cancel_ms", [0, 40])
def test_i_2_2_an_adapter_closed_while_registering_waits_for_the_provider(softnd, cancel_ms):
    for _ in range(rounds(20, 3)):
        buffers = [bytearray(64) for _ in range(20)]
        for pending in softnd.close_while_registering(buffers, slow_call("cancel", cancel_ms)):
            with pytest.raises(ndpy.CanceledError):
                pending.result(0)
        for buffer in buffers:
            buffer.append(0)


@pytest.mark.parametrize("registering", [0, 3])
def test_i_2_2_closing_an_adapter_asks_the_provider_to_end_its_registrations(softnd, native, registering):
    """They are requests of the adapter itself. softnd may have completed them by then."""
    adapter = softnd.open(slow_call("reg_mr", 50))
    this, cancelled, cancel = adapter._native, [], native.INDOverlapped_CancelOverlappedRequests

    def cancelling(target):
        cancelled.append(target == ffi.cast("struct INDOverlapped *", this))
        return cancel(target)

    native.INDOverlapped_CancelOverlappedRequests = cancelling
    pendings = [adapter.begin_register(bytearray(64)) for _ in range(registering)]
    adapter.close()
    assert cancelled == [True] * bool(registering)
    for pending in pendings:
        with pytest.raises(ndpy.CanceledError):
            pending.result(0)


def test_i_2_2_an_adapter_dropped_while_registering_is_released(softnd):
    adapter = softnd.open(slow_call("reg_mr", 30))
    buffers = [bytearray(64) for _ in range(20)]
    for buffer in buffers:
        adapter.begin_register(buffer)
    # A recorded warning would keep its object alive.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        del adapter
        wait_until(lambda: gc.collect() is not None and unused(softnd), "the adapter is closed")
    for buffer in buffers:
        buffer.append(0)


def test_i_2_8_deregistering_under_a_window_is_refused_and_harmless(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        owner = memory(keep, adapter, 64)
        bind(pair.server, keep(adapter.create_memory_window()), owner)
        with pytest.raises(ndpy.DeviceBusyError):
            owner.close()
        # The provider refuses it too.
        with pytest.raises(ndpy.DeviceBusyError):
            ndpy.platforms.networkdirect.overlapped.run(
                "deregister",
                ndpy.platforms.networkdirect.overlapped.Request(adapter._native),
                owner._request_deregister,
            )
        assert_works(keep, pair)


def test_i_2_8_many_threads_register_and_deregister(softnd):
    with opened(softnd, slow_call("reg_mr", 1)) as (adapter, _):

        def work(_) -> None:
            for size in range(1, rounds(200, 20)):
                with adapter.register(bytearray(64 * size)) as region:
                    assert region.local_token

        in_threads(4, work)


# ---- I.3, I.4: windows and transfers ----


def test_i_3_5_the_descriptor_travels_in_network_order(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        owner = memory(keep, adapter, 4096)
        window = keep(adapter.create_memory_window())
        remote = bind(pair.server, window, owner[256:1280])
        raw = bytes(ffi.buffer(lib.version1_window_descriptor(window._slot), 20))
        assert raw == remote.to_bytes() == window.remote().to_bytes()
        assert raw[:16] == (owner.address + 256).to_bytes(8, "big") + (1024).to_bytes(8, "big")
        assert int.from_bytes(raw[16:], "big") == remote.token == window.remote_token
        assert (window.length, RemoteMemory.from_bytes(raw)) == (1024, remote)


def window_of(remote: RemoteMemory) -> tuple[int, bytes]:
    """The offset and the descriptor that a request with this memory has."""
    whole = remote._sliced_from or remote
    native = ffi.new("struct ndpy_remote *", (remote.address, remote.length, whole.address, whole.length, remote.token))
    descriptor = ffi.new("unsigned char[20]")
    return lib.version1_window_of(native, descriptor), bytes(ffi.buffer(descriptor))


def test_i_4_1_a_slice_is_the_descriptor_and_an_offset(softnd):
    remote = RemoteMemory(0x7000, 1000, 0x01020304)
    assert window_of(remote) == (0, remote.to_bytes())
    piece = remote[100:600][50:150]
    assert window_of(piece) == (150, remote.to_bytes())
    assert window_of(remote[:100]) == (0, remote.to_bytes())
    assert window_of(remote[900:]) == (900, remote.to_bytes())
    # On the wire, a slice is a descriptor of its own.
    assert piece.to_bytes() == RemoteMemory(0x7000 + 150, 100, 0x01020304).to_bytes()
    assert window_of(RemoteMemory.from_bytes(piece.to_bytes())) == (0, piece.to_bytes())
    # After the program changes a field, the new value counts.
    piece.token ^= 1
    assert window_of(piece) == (150, RemoteMemory(0x7000, 1000, 0x01020305).to_bytes())
    piece.address -= 1000
    assert window_of(piece) == (0, piece.to_bytes())
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        owner = memory(keep, adapter, 4096)
        granted = bind(pair.server, keep(adapter.create_memory_window()), owner[1000:3000])
        local = memory(keep, adapter, b"0123456789")
        for offset, through in (
            (0, granted),
            (500, granted[500:]),
            (1990, granted[1000:][990:]),
            (700, RemoteMemory.from_bytes(granted[700:800].to_bytes())),
        ):
            pair.client.queue_pair.write(local, through)
            succeed(pair.client.cq)
            assert contents(owner)[1000 + offset : 1010 + offset] == b"0123456789"
            pair.client.queue_pair.write([local[5:7], local[0:1]][:1], through[0:2])
            succeed(pair.client.cq)
            assert contents(owner)[1000 + offset : 1003 + offset] == b"562"


@pytest.mark.parametrize("delay_ms", [0, 5])
def test_i_3_1_windows_closed_while_the_peer_invalidates_them(softnd, rng, delay_ms):
    """The provider may still report the invalidation, so the memory for its report outlives the window."""
    with opened(softnd, *slow_completions(delay_ms)) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        owner = memory(keep, adapter, 64)
        for number in range(rounds(500, 30)):
            window = adapter.create_memory_window()
            remote = bind(pair.server, window, owner)
            pair.server.queue_pair.receive([], context=number)
            pair.client.queue_pair.send_and_invalidate([], remote)
            until = time.perf_counter() + rng.random() * 0.002
            while time.perf_counter() < until:
                pass
            window.close()
            if rng.random() < 0.3:
                gc.collect()
            take(pair.client.cq)
            (received,) = take(pair.server.cq)
            if not received.ok:
                # The window was closed before the message came. The message named no window, which ends the connection.
                pair.server.connector.wait_disconnected(DEADLINE_S)
                pair = connect_pair(keep, adapter)
        owner.deregister(timeout_s=DEADLINE_S)


def test_i_3_1_a_queue_pair_closed_with_invalidations_that_nobody_has_seen(softnd):
    with opened(softnd) as (adapter, _keep):
        for _ in range(rounds(30, 3)):
            own = Keeper()
            pair = connect_pair(own, adapter)
            windows = [own(adapter.create_memory_window()) for _ in range(8)]
            for remote in [bind(pair.server, window, memory(own, adapter, 64)) for window in windows]:
                pair.server.queue_pair.receive([])
                pair.client.queue_pair.send_and_invalidate([], remote)
            succeed(pair.client.cq, 8)
            for window in windows[::2]:
                window.close()
            pair.server.queue_pair.close()
            assert statuses(pair.server.cq.poll()) == [Status.SUCCESS] * 8
            assert not any(window.is_bound for window in windows)
            own.close()


def post_through(queue_pair, provider) -> None:
    """Have the queue pair post through this table of functions."""
    addresses = [int(ffi.cast("uintptr_t", pointer)) for pointer in (provider, queue_pair._rings)]
    queue_pair._attach(*addresses, queue_pair._posted_requests)


def test_i_4_2_a_provider_that_does_not_have_it(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        window = keep(adapter.create_memory_window())
        remote = bind(pair.server, window, memory(keep, adapter, 64))
        queue_pair = pair.client.queue_pair
        real = queue_pair._native_provider()
        without = ffi.new("struct ndpy_provider *", real[0])
        without.post = refuse = ffi.callback(ffi.typeof(real.post), lambda *_: 0x80004001 - (1 << 32))
        post_through(queue_pair, without)
        with pytest.raises(ndpy.UnsupportedError, match="E_NOTIMPL") as caught:
            queue_pair.send_and_invalidate([], remote)
        post_through(queue_pair, real)
        del refuse
        assert (caught.value.operation, caught.value.native) == ("send_and_invalidate", 0x80004001)
        # A message that does not invalidate leaves the window to its owner.
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.send([])
        succeed(pair.server.cq)
        assert window.is_bound
        pair.server.queue_pair.invalidate(window)
        succeed(pair.server.cq)
        assert not window.is_bound
        succeed(pair.client.cq)
        assert_works(keep, pair)


def test_a_bind_over_a_binding_that_the_peer_has_ended_counts(softnd):
    """ndpy has not seen yet that the window is free. The provider knows it and binds the window."""
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter)
        first, second = memory(keep, adapter, 64), memory(keep, adapter, 64)
        window = keep(adapter.create_memory_window())
        remote = bind(pair.server, window, first)
        pair.server.queue_pair.receive([], context=1)
        pair.client.queue_pair.send_and_invalidate([], remote)
        succeed(pair.client.cq)
        time.sleep(0.1)
        pair.server.queue_pair.bind(window, second, context=2)
        assert sorted(contexts(succeed(pair.server.cq, 2))) == [1, 2]
        assert window.is_bound
        assert window.region is second
        first.deregister(timeout_s=DEADLINE_S)
        pair.client.queue_pair.write(memory(keep, adapter, b"to the second"), window.remote()[:13])
        succeed(pair.client.cq)
        assert contents(second).startswith(b"to the second")


# ---- I.5: the slots of requests ----


@pytest.mark.parametrize("depth", sample([4, 1, 16, 2, 3, 7], 3))
@pytest.mark.parametrize("signaled", [1, 0], ids=["then one signaled", "only silent"])
def test_i_5_2_silent_requests_leave_no_slot_behind(softnd, monkeypatch, depth, signaled):
    monkeypatch.setattr(queue_pairs, "_FLUSH_S", 3 * DEADLINE_S)
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter, initiator_queue_depth=depth, receive_queue_depth=64)
        queue_pair, cq = pair.client.queue_pair, pair.client.cq
        for count in range(2 * depth + 3):
            for _ in range(count):
                pair.server.queue_pair.receive([])

                def sent() -> bool:
                    with contextlib.suppress(ndpy.QueueFullError):
                        queue_pair.send([], flags=Flags.SILENT_SUCCESS)
                        return True
                    assert cq.poll() == []
                    return False

                wait_until(sent, "there is room")
            succeed(pair.server.cq, count)
        if signaled:
            pair.server.queue_pair.receive([])
            wait_until(lambda: cq.poll() == [] and queue_pair._in_flight() < depth, "there is room")
            queue_pair.send([], context=9)
            assert contexts(succeed(cq)) == [9]
            assert queue_pair._in_flight() == 0
        begun = time.monotonic()
        queue_pair.close()
        # Every request had already come back. close() waits for nothing, and the queue keeps nothing.
        assert time.monotonic() - begun < DEADLINE_S
        assert cq._freed_with_queue == []
        # The last ones may have been cancelled before ndpy looked for their acknowledgement.
        assert {completion.status for completion in cq.poll()} <= {Status.CANCELED}


def test_i_5_1_many_silent_requests_use_the_same_memory(softnd):
    with opened(softnd) as (adapter, keep):
        pair = connect_pair(keep, adapter, initiator_queue_depth=16)
        owner = memory(keep, adapter, 8)
        remote = bind(pair.server, keep(adapter.create_memory_window()), owner)
        local = memory(keep, adapter, b"contents")
        posted, deadline = 0, time.monotonic() + 10 * DEADLINE_S
        while posted < rounds(100_000, 2_000) and time.monotonic() < deadline:
            try:
                pair.client.queue_pair.write(local, remote, context=posted, flags=Flags.SILENT_SUCCESS)
                posted += 1
            except ndpy.QueueFullError:
                assert pair.client.cq.poll() == []
        wait_until(lambda: pair.client.cq.poll() == [] and pair.client.queue_pair._in_flight() < 16, "there is room")
        pair.client.queue_pair.write(local, remote, context=posted)
        assert contexts(succeed(pair.client.cq)) == [posted]
        assert pair.client.queue_pair._in_flight() == 0


@pytest.mark.parametrize("how", ["closed", "dropped", "adapter dropped"])
def test_i_5_1_slots_stay_until_the_provider_has_let_go(softnd, how):
    """Receives and sends are under way, and completions are late. The provider may not write to freed memory."""
    for _ in range(rounds(20, 2)):
        keeper = Keeper()
        adapter = softnd.open(*slow_completions(20))
        pair = connect_pair(keeper, adapter, initiator_queue_depth=16, receive_queue_depth=16)
        region = adapter.register(bytearray(4096))
        for _ in range(16):
            pair.server.queue_pair.receive(region)
        for number in range(15):
            pair.client.queue_pair.send(region, flags=Flags.SILENT_SUCCESS if number % 3 else 0)
        if how == "closed":
            pair.client.queue_pair.close()
            pair.server.queue_pair.close()
            keeper.close()
            region.close()
            adapter.close()
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            if how == "dropped":
                keeper._things.clear()
                del pair, region
                gc.collect()
                wait_until(lambda adapter=adapter: gc.collect() is not None and _closed(adapter), "all is released")
            else:
                keeper._things.clear()
                del pair, region, adapter, keeper
                wait_until(lambda: gc.collect() is not None and unused(softnd), "the adapter is closed")


def _closed(adapter) -> bool:
    try:
        adapter.close()
    except ndpy.DeviceBusyError:
        return False
    return True


# ---- with version 2, and in other processes ----


@pytest.mark.parametrize(("server", "client"), [(1, 2), (2, 1), (1, 1)])
def test_two_processes_of_either_version(server, client):
    """Each side can read the descriptor that the other sends."""
    environment = {**os.environ, "NDPY_PROVIDER": str(SOFTND)}

    def start(*words: object) -> subprocess.Popen:
        code = (
            f"import sys; sys.path[:0] = {sys.path!r}; sys.argv = {['peer', *map(str, words)]!r}\n"
            f"exec(compile(open({str(Path(__file__).parent / 'peer_of_a_version.py')!r}).read(), 'peer', 'exec'))"
        )
        return create_process(
            lambda: subprocess.Popen(
                [sys.executable, "-c", code],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )

    first = start(server, "serve")
    second = None
    try:
        word, port = first.stdout.readline().split()
        assert word == "port"
        second = start(client, "connect", port, *(["take back"] if server == client else []))
        used, trouble = second.communicate(timeout=60)
        assert second.returncode == 0, trouble
        told, trouble = first.communicate(timeout=60)
        assert first.returncode == 0, trouble
    finally:
        for process in (first, second):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()
    assert used.splitlines() == ["read memory of the server", "back written by a client."]
    # A message of version 2 cannot invalidate the window. A provider of version 2 does not report an invalidation.
    assert told.splitlines()[:2] == ["told that was all", "holds written by a client."]
    assert told.splitlines()[2] == f"bound {not (server == client == 1)}"


def test_one_process_with_an_adapter_of_each_version(softnd):
    with opened(softnd) as (one, keep):
        two = keep(softnd.open(version=2))
        assert [adapter.info.version for adapter in (one, two)] == [1, 2]
        with pytest.raises(ndpy.ForeignObjectError):
            create_end(keep, one).queue_pair.receive(memory(keep, two, 8))
        for near, far in ((one, two), (two, one)):
            client, server = create_end(keep, near), create_end(keep, far)
            offer = ask(keep, near, client.queue_pair, to=far, private_data=b"either way")
            assert offer.server.private_data == b"either way"
            establish(offer, server.queue_pair)
            for end, other in ((client, server), (server, client)):
                send_message(keep, end, other, b"hello")
            owner = memory(keep, far, b"original" * 8)
            remote = bind(server, keep(far.create_memory_window()), owner)
            local = memory(keep, near, 16, Access.LOCAL_WRITE | Access.READ_SINK)
            client.queue_pair.read(local[0:8], remote[16:24])
            client.queue_pair.write(local[0:8], remote[4:12], flags=Flags.READ_FENCE)
            succeed(client.cq, 2)
            assert contents(owner)[:16] == b"origoriginalinal"
            if far is two:
                region = memory(keep, far, b"a region of version 2's own", Access.REMOTE_READ)
                client.queue_pair.read(local[0:8], region.remote()[2:10])
                succeed(client.cq)
                assert contents(local)[:8] == b"region o"
            offer.client.disconnect(DEADLINE_S)
            offer.server.wait_disconnected(DEADLINE_S)
