"""The RetryPolicy of a queue pair, as the driver reports it."""

from __future__ import annotations

import pytest
from kit.helpers import ask, create_end, establish, require
from kit.quirks import has_quirk
from ndpy._verbs import ffi, lib

from ndpy import Capability, RetryPolicy
from ndpy.vocabulary.quirks import Quirk

POLICY = RetryPolicy(retry_count=5, rnr_retry_count=3, min_rnr_timer=20, ack_timeout=16)


def told(queue_pair) -> RetryPolicy:
    """What the driver reports. QueuePair.retry has to say the same."""
    attributes, initial = ffi.new("struct ibv_qp_attr *"), ffi.new("struct ibv_qp_init_attr *")
    wanted = lib.IBV_QP_RETRY_CNT | lib.IBV_QP_RNR_RETRY | lib.IBV_QP_MIN_RNR_TIMER | lib.IBV_QP_TIMEOUT
    assert not lib.ibv_query_qp(queue_pair._qp, attributes, wanted, initial)
    told = RetryPolicy(attributes.retry_cnt, attributes.rnr_retry, attributes.min_rnr_timer, attributes.timeout)
    assert queue_pair.retry == told
    return told


def most_retries(adapter) -> int:
    """rxe tries for ever if the count is 7."""
    return 6 if has_quirk(adapter, Quirk.RXE_RETRIES_FOR_EVER) else 7


@pytest.fixture
def ends(adapter, keep):
    require(adapter, Capability.LOOPBACK_CONNECTIONS, Capability.RETRY_POLICY)
    return create_end(keep, adapter).queue_pair, create_end(keep, adapter).queue_pair


def test_connect_and_accept_tell_all_of_it(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client, retry=POLICY)
    establish(offer, server, retry=RetryPolicy(retry_count=1, rnr_retry_count=0, min_rnr_timer=0, ack_timeout=20))
    assert told(client) == POLICY
    assert told(server) == RetryPolicy(1, 0, 0, 20)


def test_what_a_policy_leaves_open_is_as_without_one(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client, retry=RetryPolicy(min_rnr_timer=1))
    establish(offer, server)
    usual = told(server)
    # A message that nobody receives fails after six times 122.88 ms.
    assert (usual.retry_count, usual.rnr_retry_count, usual.min_rnr_timer) == (most_retries(adapter), 6, 27)
    assert told(client) == RetryPolicy(most_retries(adapter), 6, 1, usual.ack_timeout)
    print(f"without a policy: {usual}, gives up after {usual.gives_up_s:.2f} s")
    assert usual.gives_up_s < 60


def test_a_count_of_7_is_as_many_retries_as_end(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client, retry=RetryPolicy(retry_count=7))
    establish(offer, server, retry=RetryPolicy(retry_count=7))
    assert {told(client).retry_count, told(server).retry_count} == {most_retries(adapter)}


def test_connect_endpoint_takes_a_policy_too(adapter, ends):
    near, far = ends
    endpoints = near.local_endpoint(), far.local_endpoint()
    near.connect_endpoint(endpoints[1], retry=POLICY)
    far.connect_endpoint(endpoints[0], retry=RetryPolicy(ack_timeout=18))
    assert told(near) == POLICY
    assert told(far) == RetryPolicy(most_retries(adapter), RetryPolicy.ENDLESS, 12, 18)
