"""What remains of the former use of a queue pair or a window, over a provider without a device."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from fake_verbs import opened
from kit.deadlines import DEADLINE_S
from kit.helpers import Replacing, wait_until
from racing import Elsewhere

import ndpy
from ndpy import Access, Endpoint, Status
from ndpy.platforms.verbs import queue_pair as queue_pairs
from ndpy.platforms.verbs.native_calls import lib

SERVER = ("127.0.0.1", 4791)


adapter = opened(windows=1)


def refuse(fake, adapter, queue_pair):
    """Neither connect nor accept takes this queue pair. No peer is asked."""
    before = fake.counts.identifiers
    with adapter.create_connector() as client:
        with pytest.raises(ndpy.ConnectionActiveError, match="one connection in its life"):
            client.begin_connect(queue_pair, SERVER)
        assert client.state == "idle"
    with adapter.listen(("127.0.0.1", 0)) as listener:
        fake.request(listener)
        with listener.get_request(DEADLINE_S) as server:
            with pytest.raises(ndpy.ConnectionActiveError, match="one connection in its life"):
                server.begin_accept(queue_pair)
            assert server.state == "requested"
    assert fake.counts.identifiers == before


def test_h_4_a_queue_pair_that_was_connected_is_refused_although_its_connector_is_gone(fake, adapter, queue):
    with adapter.create_queue_pair(queue) as queue_pair:
        adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S).close()
        assert queue_pair.connector is None
        refuse(fake, adapter, queue_pair)


def test_h_4_a_queue_pair_whose_connection_is_being_made_is_refused(fake, adapter, queue):
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_CONNECT_RESPONSE
    with adapter.create_queue_pair(queue) as queue_pair, adapter.create_connector() as client:
        connecting = client.begin_connect(queue_pair, SERVER)
        refuse(fake, adapter, queue_pair)
        assert not connecting.done()
        assert queue_pair.connector is client
        connecting.cancel()


def test_h_4_a_queue_pair_that_a_refused_attempt_has_ended_is_refused(fake):
    """On iWARP the kernel moves it to the error state."""
    fake.have_address()
    fake.speak_iwarp()
    fake.connecting.silent = 1 << lib.RDMA_CM_EVENT_ESTABLISHED
    with fake.open_pair() as (adapter, _, queue_pair):
        with adapter.create_connector() as client:
            connecting = client.begin_connect(queue_pair, SERVER)
            fake.connection_event(client, lib.RDMA_CM_EVENT_REJECTED)
            with pytest.raises(ndpy.ConnectionRefusedError):
                connecting.result(DEADLINE_S)
        assert queue_pair.connection_ended
        assert queue_pair._never_connected
        refuse(fake, adapter, queue_pair)


def test_h_4_two_connectors_that_take_a_queue_pair_at_once_do_not_both_get_it(adapter, queue, monkeypatch):
    """The second one comes after the first has found the queue pair free."""
    others: list[Elsewhere] = []
    ended: Any = inspect.getattr_static(ndpy.QueuePair, "_ended")

    class Watched:
        """The attribute that the first one looks at last."""

        def __get__(self, queue_pair, kind):
            if not others:
                others.append(Elsewhere(lambda: second.begin_connect(queue_pair, SERVER)).start())
                others[0].thread.join(0.05)
            return ended.__get__(queue_pair)

        def __set__(self, queue_pair, value):
            ended.__set__(queue_pair, value)

    with (
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.create_connector() as first,
        adapter.create_connector() as second,
    ):
        monkeypatch.setattr(ndpy.QueuePair, "_ended", Watched(), raising=False)
        connecting = first.begin_connect(queue_pair, SERVER)
        assert isinstance(others[0].outcome(), ndpy.ConnectionActiveError)
        assert queue_pair.connector is first
        connecting.result(DEADLINE_S)


def test_a_queue_pair_that_was_connected_without_a_connector_is_refused(fake, adapter, queue):
    with adapter.create_queue_pair(queue) as queue_pair:
        # The last step of connect_endpoint(). The whole call needs a device.
        queue_pair._begin_connection()
        refuse(fake, adapter, queue_pair)


def test_what_connect_endpoint_says_that_it_raises_is_what_a_used_queue_pair_raises(adapter, queue):
    remote = Endpoint(lid=1, qp_number=1, psn=1, gid=bytes(16), gid_index=0, gid_type="", mtu=1024, port=1)
    with adapter.create_queue_pair(queue) as queue_pair:
        queue_pair._begin_connection()
        with pytest.raises(ndpy.ConnectionActiveError) as raised:
            queue_pair.connect_endpoint(remote)
        assert (
            f"{type(raised.value).__name__}: the queue pair is connected, or was"
            in ndpy.QueuePair.connect_endpoint.__doc__
        )


@pytest.mark.parametrize("failure", ["IBV_WC_MW_BIND_ERR", "IBV_WC_WR_FLUSH_ERR"])
def test_e_2_a_window_whose_bind_failed_can_be_bound_again(fake, adapter, queue, failure):
    """A device finds a window by its key. A failed bind does not change the key.

    A queue pair that is older than the native window uses that window again.
    """
    queue_pairs = [adapter.create_queue_pair(queue) for _ in range(3)]
    connectors = [adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) for queue_pair in queue_pairs]
    with adapter.create_memory_window() as window, adapter.register(bytearray(4096), Access.LOCAL_WRITE) as region:
        for ends in (getattr(lib, failure), getattr(lib, failure), lib.IBV_WC_SUCCESS):
            queue_pair = queue_pairs.pop()
            queue_pair.bind(window, region)
            fake.complete(queue_pair, receive=False, status=ends)
            (completion,) = queue.wait(DEADLINE_S)
            assert (completion.status is Status.SUCCESS) == window.is_bound == (ends == lib.IBV_WC_SUCCESS)
            connectors.pop().close()
            queue_pair.close()
    assert fake.counts.windows == 0


def test_e_2_a_bind_that_fails_before_its_post_returns_leaves_the_window_as_it_was(fake, adapter, queue, monkeypatch):
    """Another thread takes the completion before the post returns."""
    queue_pairs_left = [adapter.create_queue_pair(queue) for _ in range(2)]
    connectors = [adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) for queue_pair in queue_pairs_left]
    polling: list[Elsewhere] = []

    def post_late(*arguments: Any) -> int:
        """Returns only after its request has failed."""
        posted = lib.ndpy_post_bind(*arguments)
        fake.complete(failing, receive=False, status=lib.IBV_WC_MW_BIND_ERR)
        polling.append(Elsewhere(queue.poll).start())
        wait_until(lambda: not failing._posted_requests.initiator, "the completion is taken")
        return int(posted)

    # The younger one comes first. Then the older one uses the same native window again.
    failing, other = queue_pairs_left[1], queue_pairs_left[0]
    with adapter.create_memory_window() as window, adapter.register(bytearray(4096), Access.LOCAL_WRITE) as region:
        with monkeypatch.context() as patched:
            patched.setattr(queue_pairs, "lib", Replacing(lib, ndpy_post_bind=post_late))
            failing.bind(window, region)
        (failed,) = polling[0].result()
        assert failed.status is Status.INVALID_REQUEST
        assert not window.is_bound
        other.bind(window, region)
        fake.complete(other, receive=False, status=lib.IBV_WC_SUCCESS)
        (bound,) = queue.wait(DEADLINE_S)
        assert (bound.status, window.is_bound) == (Status.SUCCESS, True)
        for resource in (*connectors, *queue_pairs_left):
            resource.close()


def test_e_2_a_window_can_lose_its_queue_pair_while_another_one_binds_it(fake, adapter, queue, monkeypatch):
    """The queue pair that is closed frees the native window."""
    former, other = (adapter.create_queue_pair(queue) for _ in range(2))
    connectors = [adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S) for queue_pair in (former, other)]

    def post_late(*arguments: Any) -> int:
        """The former queue pair is closed before this returns."""
        posted = lib.ndpy_post_bind(*arguments)
        Elsewhere(former.close).start().result()
        return int(posted)

    with adapter.create_memory_window() as window, adapter.register(bytearray(4096), Access.LOCAL_WRITE) as region:
        former.bind(window, region)
        fake.complete(former, receive=False, status=lib.IBV_WC_SUCCESS)
        queue.wait(DEADLINE_S)
        with monkeypatch.context() as patched:
            patched.setattr(queue_pairs, "lib", Replacing(lib, ndpy_post_bind=post_late))
            other.bind(window, region)
        fake.complete(other, receive=False, status=lib.IBV_WC_MW_BIND_ERR)
        (failed,) = queue.wait(DEADLINE_S)
        assert (failed.status, window.is_bound) == (Status.INVALID_REQUEST, False)
        for resource in (*connectors, other):
            resource.close()


def test_e_2_a_window_that_the_peer_has_invalidated_is_bound_again_although_nobody_was_told(fake, adapter, queue):
    """The bind is posted before the program takes the message's completion, which reports the invalidation."""
    with (
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.register(bytearray(4096), Access.LOCAL_WRITE) as region,
    ):
        connector = adapter.connect(queue_pair, SERVER, timeout_s=DEADLINE_S)
        with adapter.create_memory_window() as window:
            tokens = []
            for memory in (region, region[0:64], region[64:128]):
                queue_pair.bind(window, memory)
                fake.complete(queue_pair, receive=False)
                (completion,) = queue.wait(DEADLINE_S)
                assert completion.status is Status.SUCCESS
                assert (window.is_bound, window.length) == (True, memory.length)
                tokens.append(window.remote_token)
            assert len(set(tokens)) == 3
            # The report is late. The binding that it concerns no longer exists.
            queue_pair._on_window_lost(tokens[0])
            assert window.is_bound
        connector.close()
