"""Connectors and listeners when a provider refuses a step or answers it in an unusual way."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import warnings

import pytest
from kit.helpers import DEADLINE_S, QUIET_S, ask, create_end, host_of
from own_softnd import keep_with_adapter

import ndpy
from ndpy.platforms.networkdirect import connection
from ndpy.platforms.networkdirect.native_calls import PENDING

BOTH = pytest.mark.parametrize("version", [2, 1])
INTERNAL_ERROR = 0xC00000E5
SHARING_VIOLATION = 0xC0000043
CONNECTION_INVALID = 0xC000023A
INSUFFICIENT_RESOURCES = 0xC000009A


@pytest.fixture
def keep(softnd):
    yield from keep_with_adapter(softnd)


def ends(keep):
    return [create_end(keep, keep.adapter) for _ in range(2)]


# ---- bind ----


def test_h_2_1_bind_goes_on_to_a_port_that_is_free(keep, native):
    bind, calls = native.IND2Connector_Bind, []

    def binding(*arguments):
        calls.append(arguments)
        return SHARING_VIOLATION - (1 << 32) if len(calls) < 4 else bind(*arguments)

    native.IND2Connector_Bind = binding
    connector = keep(keep.adapter.create_connector())
    connector.bind((host_of(keep.adapter), 0))
    assert len(calls) == 4
    assert connector.state == "bound"
    assert 49152 <= connector.local_address[1] <= 65535


def test_bind_ends_when_no_port_is_free(keep, native, monkeypatch):
    monkeypatch.setattr(connection, "_PORTS", 8)
    calls = native.answer("IND2Connector_Bind", SHARING_VIOLATION)
    connector = keep(keep.adapter.create_connector())
    with pytest.raises(ndpy.AddressInUseError, match="no port of"):
        connector.bind((host_of(keep.adapter), 0))
    # Each port was tried once.
    assert len({bytes(packed) for _, packed, _ in calls}) == len(calls) == 8
    assert connector.state == "idle"
    # A failure that does not concern the port is not tried again with another port.
    calls = native.answer("IND2Connector_Bind", INTERNAL_ERROR)
    with pytest.raises(ndpy.ProviderError) as caught:
        connector.bind((host_of(keep.adapter), 0))
    assert (len(calls), caught.value.native) == (1, INTERNAL_ERROR)


def test_h_2_4_after_a_bind_that_fails_connect_comes_from_the_address_of_the_one_before(keep, native):
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    connector = keep(keep.adapter.create_connector())
    connector.bind((host_of(keep.adapter), 0))
    before = connector.local_address
    native.answer("IND2Connector_Bind", SHARING_VIOLATION)
    with pytest.raises(ndpy.AddressInUseError):
        connector.bind((host_of(keep.adapter), 9))
    del native.IND2Connector_Bind
    assert (connector.state, connector.local_address) == ("bound", before)
    connector.begin_connect(create_end(keep, keep.adapter).queue_pair, listener.address)
    assert keep(listener.get_request(DEADLINE_S)).peer_address == before


# ---- connect ----


@BOTH
def test_a_connect_with_an_argument_that_is_none_changes_nothing(keep, version):
    client, server = ends(keep)
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    connector = keep(keep.adapter.create_connector())
    with pytest.raises(ValueError, match="read limit"):
        connector.begin_connect(client.queue_pair, listener.address, inbound_read_limit="many")
    assert (connector.state, client.queue_pair.connector) == ("idle", None)
    connecting = connector.begin_connect(client.queue_pair, listener.address)
    keep(listener.get_request(DEADLINE_S)).begin_accept(server.queue_pair)
    connecting.result(DEADLINE_S)
    assert connector.state == "offered"


@BOTH
@pytest.mark.parametrize("bound", [False, True])
def test_a_connect_that_is_refused_at_once_changes_nothing(keep, version, native, bound):
    client, server = ends(keep)
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    connector = keep(keep.adapter.create_connector())
    if bound:
        connector.bind((host_of(keep.adapter), 0))
    connect = "IND2Connector_Connect" if version == 2 else "INDConnector_Connect"
    native.answer(connect, INSUFFICIENT_RESOURCES)
    with pytest.raises(ndpy.InsufficientResourcesError) as caught:
        connector.begin_connect(client.queue_pair, listener.address)
    assert caught.value.native == INSUFFICIENT_RESOURCES
    assert (connector.state, client.queue_pair.connector) == ("bound" if bound else "idle", None)
    delattr(native, connect)
    connecting = connector.begin_connect(client.queue_pair, listener.address)
    keep(listener.get_request(DEADLINE_S)).begin_accept(server.queue_pair)
    connecting.result(DEADLINE_S)


@BOTH
@pytest.mark.parametrize(("status", "state"), [(0xC00000B5, "idle"), (0xC000023D, "idle"), (INTERNAL_ERROR, "failed")])
def test_h_4_2_after_which_ends_of_connect_it_may_be_tried_again(keep, version, native, status, state):
    """The request may end later in the provider's thread, or inline (contract C.2.1)."""
    end = create_end(keep, keep.adapter)
    connector = keep(keep.adapter.create_connector())
    result = "ndpy_request_result" if version == 2 else "version1_request_result"
    real = getattr(native, result)

    def failing(target, request):
        given = real(target, request) & 0xFFFFFFFF
        return given if given == PENDING else status - (1 << 32)

    setattr(native, result, failing)
    pending = connector.begin_connect(end.queue_pair, (host_of(keep.adapter), 9))
    with pytest.raises(ndpy.ProviderError) as caught:
        pending.result(DEADLINE_S)
    assert caught.value.native == status
    assert (connector.state, end.queue_pair.connector) == (state, None)
    kind = {0xC00000B5: ndpy.TimeoutError, 0xC000023D: ndpy.AddressUnreachableError}.get(status, ndpy.ProviderError)
    assert type(caught.value) is kind
    if state == "failed":
        with pytest.raises(ndpy.NotConnectedError):
            connector.begin_connect(end.queue_pair, (host_of(keep.adapter), 9))


@BOTH
def test_complete_connect_is_for_once(keep, version):
    client, server = ends(keep)
    offer = ask(keep, keep.adapter, client.queue_pair)
    accepting = offer.server.begin_accept(server.queue_pair)
    offer.connecting.result(DEADLINE_S)
    # The lock keeps the adapter's thread from handling the end between the two calls.
    with offer.client._state_lock:
        completing = offer.client.begin_complete_connect()
        if not completing.done():
            with pytest.raises(ndpy.NotConnectedError, match="completing"):
                offer.client.begin_complete_connect()
    completing.result(DEADLINE_S)
    accepting.result(DEADLINE_S)
    assert offer.client.state == "established"


@BOTH
def test_a_complete_connect_that_is_refused_is_the_end_of_the_attempt(keep, version, native):
    client, server = ends(keep)
    offer = ask(keep, keep.adapter, client.queue_pair)
    offer.server.begin_accept(server.queue_pair)
    offer.connecting.result(DEADLINE_S)
    native.answer("IND2Connector_CompleteConnect" if version == 2 else "INDConnector_CompleteConnect", INTERNAL_ERROR)
    with pytest.raises(ndpy.ProviderError) as caught:
        offer.client.begin_complete_connect()
    assert caught.value.native == INTERNAL_ERROR
    assert (offer.client.state, client.queue_pair.connector) == ("failed", None)
    with pytest.raises(ndpy.ConnectionActiveError):
        keep(keep.adapter.create_connector()).begin_connect(client.queue_pair, offer.listener.address)


@BOTH
def test_h_8_a_connection_whose_end_cannot_be_watched_has_ended(keep, version, native):
    client, server = ends(keep)
    offer = ask(keep, keep.adapter, client.queue_pair)
    accepting = offer.server.begin_accept(server.queue_pair)
    offer.connecting.result(DEADLINE_S)
    name = "IND2Connector_NotifyDisconnect" if version == 2 else "INDConnector_NotifyDisconnect"
    native.answer(name, CONNECTION_INVALID)
    offer.complete(accepting)
    assert offer.client.state == offer.server.state == "disconnected"
    offer.client.wait_disconnected(0)


# ---- accept ----


@pytest.mark.parametrize("version", [2])
def test_h_7_4_a_request_whose_client_has_gone_can_be_looked_at(keep, native):
    native.answer("IND2Connector_GetReadLimits", 0xC0000241)
    native.answer("IND2Connector_GetPrivateData", 0xC0000241)
    offer = ask(keep, keep.adapter, ends(keep)[0].queue_pair, private_data=b"data")
    assert offer.server.state == "requested"
    assert offer.server.read_limits == (0, 0)
    assert offer.server.private_data == b""


@BOTH
def test_who_has_refused_cannot_accept_any_more(keep, version):
    client, server = ends(keep)
    offer = ask(keep, keep.adapter, client.queue_pair)
    offer.server.reject()
    with pytest.raises(ndpy.ConnectionAbortedError):
        offer.server.begin_accept(server.queue_pair)
    assert server.queue_pair.connector is None


@BOTH
@pytest.mark.parametrize("what", ["refused", "interrupted"])
def test_an_accept_that_did_not_start_lets_the_queue_pair_go(keep, version, what):
    client, server = ends(keep)
    offer = ask(keep, keep.adapter, client.queue_pair)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    if what == "interrupted":
        offer.server._prepare_connection = interrupted
    else:
        offer.server._accept_native = lambda *arguments: 0xC0000241 - (1 << 32)
    with pytest.raises(KeyboardInterrupt if what == "interrupted" else ndpy.ConnectionAbortedError) as caught:
        offer.server.begin_accept(server.queue_pair)
    assert "the client has given up" in str(caught.value) or what == "interrupted"
    assert (offer.server.state, server.queue_pair.connector) == ("failed", None)


@BOTH
def test_an_accept_that_is_cancelled_takes_the_queue_pair_with_it(keep, version):
    """The client may already have the offer, so messages may come."""
    client, server = ends(keep)
    offer = ask(keep, keep.adapter, client.queue_pair)
    accepting = offer.server.begin_accept(server.queue_pair)
    assert accepting.cancel()
    with pytest.raises(ndpy.CanceledError):
        accepting.result(0)
    assert (offer.server.state, server.queue_pair.connector) == ("failed", None)
    with pytest.raises(ndpy.ConnectionActiveError):
        keep(keep.adapter.create_connector()).begin_connect(server.queue_pair, offer.listener.address)


# ---- close ----


@BOTH
@pytest.mark.parametrize("kind", [ndpy.DeviceBusyError, KeyboardInterrupt])
def test_a_close_that_fails_ends_what_was_begun_and_can_be_repeated(keep, version, monkeypatch, kind):
    end = create_end(keep, keep.adapter)
    connector = keep.adapter.create_connector()
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    pending = connector.begin_connect(end.queue_pair, listener.address)

    def fail(requests) -> None:
        raise kind("the provider did not let go")

    with monkeypatch.context() as broken:
        broken.setattr(connection, "cancel_all", fail)
        with pytest.raises(kind):
            connector.close()
    assert connector._requests
    assert not connector.closed
    with pytest.raises(ndpy.CanceledError, match="was being closed"):
        pending.result(0)
    connector.close()
    assert connector.closed
    assert end.queue_pair.connector is None


# ---- listeners ----


@BOTH
def test_a_listener_that_cannot_ask_is_not_made(keep, version, native):
    name = "IND2Listener_GetConnectionRequest" if version == 2 else "INDListen_GetConnectionRequest"
    native.answer(name, INSUFFICIENT_RESOURCES)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(ndpy.InsufficientResourcesError) as caught:
            keep.adapter.listen((host_of(keep.adapter), 0))
        assert (caught.value.operation, caught.value.native) == ("get_request", INSUFFICIENT_RESOURCES)
        del caught
        gc.collect()
    # The failed listen() leaves no open listener behind, so no ResourceWarning comes.
    assert [str(warning.message) for warning in told] == []


@BOTH
def test_h_3_a_place_to_listen_that_is_taken_leaves_nothing(keep, version):
    """The fixture counts softnd's objects at the end."""
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    with pytest.raises(ndpy.AddressInUseError, match=rf"cannot listen at .* port {listener.address[1]}"):
        keep.adapter.listen(listener.address)


@BOTH
def test_a_request_for_which_the_provider_has_no_room_is_told_to_those_who_wait(keep, version, native):
    """The listener still works: the next call gets the next request."""
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    asking = [listener.begin_get_request() for _ in range(3)]
    name = "IND2Listener_GetConnectionRequest" if version == 2 else "INDListen_GetConnectionRequest"
    native.answer(name, INSUFFICIENT_RESOURCES)
    first, second = ends(keep)
    connector = keep(keep.adapter.create_connector())
    connector.begin_connect(first.queue_pair, listener.address)
    keep(asking[0].result(DEADLINE_S))
    for pending in asking[1:]:
        with pytest.raises(ndpy.InsufficientResourcesError) as caught:
            pending.result(DEADLINE_S)
        assert caught.value.native == INSUFFICIENT_RESOURCES
    with pytest.raises(ndpy.InsufficientResourcesError):
        listener.begin_get_request()
    delattr(native, name)
    pending = listener.begin_get_request()
    keep(keep.adapter.create_connector()).begin_connect(second.queue_pair, listener.address)
    keep(pending.result(DEADLINE_S))


@BOTH
def test_a_failed_request_of_a_listener_is_told_to_one_who_waits(keep, version, native):
    result = "ndpy_request_result" if version == 2 else "version1_request_result"
    real, failures = getattr(native, result), [INTERNAL_ERROR]

    def failing(target, request):
        given = real(target, request) & 0xFFFFFFFF
        if given == PENDING or threading.current_thread() is threading.main_thread():
            return given
        return failures.pop() - (1 << 32) if failures else given

    setattr(native, result, failing)
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    delattr(native, result)
    asking = [listener.begin_get_request() for _ in range(2)]
    first, second = ends(keep)
    keep(keep.adapter.create_connector()).begin_connect(first.queue_pair, listener.address)
    with pytest.raises(ndpy.ProviderError) as caught:
        asking[0].result(DEADLINE_S)
    assert (caught.value.operation, caught.value.native) == ("get_request", INTERNAL_ERROR)
    keep(keep.adapter.create_connector()).begin_connect(second.queue_pair, listener.address)
    keep(asking[1].result(DEADLINE_S))


@BOTH
def test_h_3_11_requests_that_come_faster_than_they_are_taken_wait_with_the_provider(keep, version):
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    clients = [(create_end(keep, keep.adapter), keep(keep.adapter.create_connector())) for _ in range(5)]
    # With this lock held, the adapter's thread gets no further than the first request.
    with listener._lifetime:
        for end, connector in clients:
            connector.begin_connect(end.queue_pair, listener.address)
        time.sleep(QUIET_S)
    for _ in clients:
        keep(listener.get_request(DEADLINE_S))
    assert [connector.state for _, connector in clients] == ["connecting"] * len(clients)


@BOTH
def test_a_connection_that_came_while_the_listener_was_closed_is_refused(keep, version, monkeypatch):
    listener = keep.adapter.listen((host_of(keep.adapter), 0))
    (request,) = listener._requests
    events, arrived = keep.adapter._events, threading.Event()
    on_packet = events._on_packet

    def left_to_close(key) -> None:
        if key == request.key:
            arrived.set()
        else:
            on_packet(key)

    monkeypatch.setattr(events, "_on_packet", left_to_close)
    end = create_end(keep, keep.adapter)
    connecting = keep(keep.adapter.create_connector()).begin_connect(end.queue_pair, listener.address)
    assert arrived.wait(DEADLINE_S)
    listener.close()
    with pytest.raises(ndpy.ConnectionRefusedError):
        connecting.result(DEADLINE_S)


# ---- version 1: ports and time ----


@pytest.mark.parametrize("version", [1])
@pytest.mark.parametrize("inline", [True, False])
def test_i_6_2_a_port_that_is_taken_is_another_choice(keep, native, inline):
    """In version 1, bind() cannot ask the provider. connect() finds out that the port is taken."""
    client, server = ends(keep)
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    connector = keep(keep.adapter.create_connector())
    connector.bind((host_of(keep.adapter), 0))
    chosen = connector.local_address[1]
    connect, tried = native.INDConnector_Connect, []

    def connecting(*arguments):
        tried.append(arguments[5])
        if len(tried) < 4 and inline:
            return SHARING_VIOLATION - (1 << 32)
        return connect(*arguments)

    native.INDConnector_Connect = connecting
    if not inline:
        real = native.version1_request_result
        failures = [SHARING_VIOLATION] * 3

        def failing(target, request):
            given = real(target, request) & 0xFFFFFFFF
            return given if given == PENDING or not failures else failures.pop() - (1 << 32)

        # A connect to a port where nobody listens ends soon. The last one gets its real result.
        native.version1_request_result = failing
    pending = connector.begin_connect(client.queue_pair, listener.address)
    with contextlib.suppress(ndpy.ProviderError):
        keep(listener.get_request(DEADLINE_S)).begin_accept(server.queue_pair)
        pending.result(DEADLINE_S)
    assert len(tried) >= 4 or not inline
    assert len(set(tried)) > 1
    assert connector.local_address[1] != chosen
    assert 49152 <= connector.local_address[1] <= 65535


@pytest.mark.parametrize("version", [1])
def test_i_6_2_connect_ends_when_no_port_is_free(keep, native):
    connector = keep(keep.adapter.create_connector())
    connector.bind((host_of(keep.adapter), 0))
    calls = native.answer("INDConnector_Connect", SHARING_VIOLATION)
    with pytest.raises(ndpy.AddressInUseError):
        connector.begin_connect(ends(keep)[0].queue_pair, (host_of(keep.adapter), 9))
    assert 100 < len(calls) < 1000
    assert connector.state == "bound"


@pytest.mark.parametrize("version", [1])
def test_i_6_2_a_port_that_the_program_named_is_not_exchanged(keep, native):
    connector = keep(keep.adapter.create_connector())
    connector.bind((host_of(keep.adapter), 50000))
    calls = native.answer("INDConnector_Connect", SHARING_VIOLATION)
    with pytest.raises(ndpy.AddressInUseError) as caught:
        connector.begin_connect(ends(keep)[0].queue_pair, (host_of(keep.adapter), 9))
    assert (len(calls), caught.value.native) == (1, SHARING_VIOLATION)
    assert connector.local_address[1] == 50000


@pytest.mark.parametrize("version", [1])
def test_i_6_6_a_next_try_without_memory_ends_the_connect(keep, monkeypatch):
    """ndpy refuses it, so it has no status of the provider."""
    listener = keep(keep.adapter.listen((host_of(keep.adapter), 0)))
    connector = keep(keep.adapter.create_connector())
    pending = connector.begin_connect(create_end(keep, keep.adapter).queue_pair, listener.address)

    def refuse() -> None:
        raise ndpy.InsufficientResourcesError("no event", operation="overlapped request")

    monkeypatch.setattr(connector, "_try", refuse)
    with connector._state_lock:
        connector._retry(connector._attempts)
    with pytest.raises(ndpy.InsufficientResourcesError, match="no event"):
        pending.result(DEADLINE_S)
    assert connector.state == "failed"
