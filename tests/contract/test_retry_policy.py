"""RetryPolicy: how long a message waits for the receive that takes it."""

from __future__ import annotations

import pytest
from kit.documentation import example
from kit.helpers import (
    DEADLINE_S,
    ask,
    assert_quiet,
    assert_works,
    connect_ends,
    connect_pair,
    contents,
    contexts,
    create_end,
    establish,
    host_of,
    memory,
    require,
    statuses,
    succeed,
    take,
)
from kit.threads import beside

import ndpy
from ndpy import RetryPolicy, Status

# Without a policy a message waits for 0.7 s.
LATE_S = 2.0
PATIENT = RetryPolicy(rnr_retry_count=RetryPolicy.ENDLESS)


@pytest.fixture
def ends(adapter, keep, peer):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS, ndpy.Capability.RETRY_POLICY)
    return create_end(keep, adapter), create_end(keep, peer)


def send_before_the_receive(keep, source, sink):
    """Send a message, and post its receive LATE_S later. The message must arrive."""
    source.queue_pair.send(memory(keep, source.adapter, b"early"), context=1)
    assert_quiet(source.cq, LATE_S)
    inbox = memory(keep, sink.adapter, 64)
    sink.queue_pair.receive(inbox, context=2)
    (sent,), (received,) = succeed(source.cq), succeed(sink.cq)
    assert (sent.context, received.context, received.nbytes) == (1, 2, 5)
    assert contents(inbox).startswith(b"early")


def test_a_policy_of_connect_makes_the_clients_messages_wait(adapter, keep, ends):
    client, server = ends
    connect_ends(keep, adapter, client, server, retry=PATIENT)
    send_before_the_receive(keep, client, server)
    # The policy is the client's alone. A message of the server still fails.
    server.queue_pair.send([], context=3)
    assert statuses(take(server.cq)) == [Status.IO_TIMEOUT]


def test_a_policy_of_accept_makes_the_servers_messages_wait(adapter, keep, ends):
    client, server = ends
    offer = ask(keep, adapter, client.queue_pair)
    establish(offer, server.queue_pair, retry=PATIENT)
    send_before_the_receive(keep, server, client)
    client.queue_pair.send([], context=3)
    assert statuses(take(client.cq)) == [Status.IO_TIMEOUT]


def test_connect_and_complete_in_one_call_takes_a_policy(adapter, keep, ends):
    """The server is on this host: a function cannot be called back from the other one."""
    server, client = ends
    listener = keep(adapter.listen((host_of(adapter), 0)))
    asked = listener.begin_get_request()
    asked.add_done_callback(lambda request: accepted.append(request.result().begin_accept(server.queue_pair)))
    accepted: list[ndpy.Pending[None]] = []
    keep(client.adapter.connect(client.queue_pair, listener.address, retry=PATIENT, timeout_s=DEADLINE_S))
    keep(asked.result(DEADLINE_S))
    accepted[0].result(DEADLINE_S)
    send_before_the_receive(keep, client, server)


def test_no_retry_at_all_fails_at_once(adapter, keep, ends, peer):
    """It fails before an earlier message that is tried six times more, at the longest intervals."""
    client, server = ends
    other = create_end(keep, adapter, cq=client.cq), create_end(keep, peer)
    for source, sink, policy in (
        (client, server, RetryPolicy(rnr_retry_count=0)),
        (*other, RetryPolicy(rnr_retry_count=6)),
    ):
        offer = ask(keep, adapter, source.queue_pair, retry=policy)
        establish(offer, sink.queue_pair, retry=RetryPolicy(min_rnr_timer=0))
    other[0].queue_pair.send([], context=2)
    client.queue_pair.send([], context=1)
    ended = take(client.cq, 2)
    assert contexts(ended) == [1, 2]
    assert statuses(ended) == [Status.IO_TIMEOUT] * 2


def test_a_policy_is_refused_where_there_is_none_and_changes_nothing(adapter, keep, peer):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    if ndpy.Capability.RETRY_POLICY in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} has RETRY_POLICY")
    client, server = create_end(keep, adapter), create_end(keep, peer)
    connector = keep(adapter.create_connector())
    with pytest.raises(ndpy.UnsupportedError, match="RETRY_POLICY"):
        connector.begin_connect(client.queue_pair, (host_of(adapter), 9), retry=PATIENT)
    assert connector.state == "idle"
    offer = ask(keep, adapter, client.queue_pair)
    with pytest.raises(ndpy.UnsupportedError, match="RETRY_POLICY"):
        offer.server.accept(server.queue_pair, retry=PATIENT, timeout_s=DEADLINE_S)
    assert offer.server.state == "requested"
    offer.server.close()
    offer.listener.close()
    assert_works(keep, connect_pair(keep, adapter))


def test_a_queue_pair_says_what_its_connection_has(adapter, keep, pair):
    """Adapters without retries of their own say nothing."""
    with pytest.raises(ndpy.NotConnectedError):
        _ = create_end(keep, adapter).queue_pair.retry
    for end in pair:
        said = end.queue_pair.retry
        if ndpy.Capability.RETRY_POLICY not in adapter.info.capabilities:
            assert said == RetryPolicy()
            assert said.gives_up_s is None
        else:
            assert said.retry_count is not None
            assert 0 < said.gives_up_s < 300
    pair.client.connector.disconnect(DEADLINE_S)
    # A program may ask after its request has failed.
    assert pair.client.queue_pair.retry == said


def test_the_example_of_the_documentation_works(adapter, keep, ends, capsys):
    program = example("howto/dead_peer.md", "gives_up_s")
    near, far = ends
    listener = keep(far.adapter.listen((host_of(far.adapter), 0)))
    address = '("192.0.2.1", 7471)'
    assert address in program
    names = {"ndpy": ndpy, "adapter": adapter, "near": near.queue_pair}
    with beside(lambda: keep(listener.get_request(DEADLINE_S)).accept(far.queue_pair, timeout_s=DEADLINE_S)):
        exec(program.replace(address, repr(listener.address[:2])), names)
        keep(names["connector"])
    said, promised = float(capsys.readouterr().out), float(program.partition("gives_up_s)  # ")[2].partition(",")[0])
    assert said == pytest.approx(promised, abs=0.005)
    succeed(near.cq)
