"""A provider that returns its results inline, and one whose requests end in two phases (contract C.2.1, C.4.5).

Both are providers/inline_provider.c, which uses a softnd of its own.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.helpers import (
    DEADLINE_S,
    STRESS,
    Keeper,
    assert_works,
    connect_pair,
    create_end,
    host_of,
    send_message,
    take,
    wait_until,
)
from kit.threads import Elsewhere, beside
from own_softnd import PROVIDERS, SOFTND, child

import ndpy
from ndpy.platforms.networkdirect import overlapped
from ndpy.platforms.networkdirect.native_calls import PENDING, SUCCESS


@pytest.fixture
def inline(tmp_path, monkeypatch):
    """inline(**settings) opens an adapter of the provider, which loads softnd.dll from the folder above its own."""
    folder = tmp_path / "inline"
    folder.mkdir()
    shutil.copy(SOFTND, tmp_path / "softnd.dll")
    path = Path(shutil.copy(PROVIDERS / "inline_provider.dll", folder / f"{tmp_path.name}.dll"))

    def open_one(**settings):
        with monkeypatch.context() as environment:
            for name, value in settings.items():
                environment.setenv(f"INLINE_{name.upper()}", str(value))
            return ndpy.open_adapter("127.0.0.1", provider=path)

    return open_one


@pytest.fixture
def statuses(monkeypatch):
    """The statuses that the provider returned when requests were issued."""
    seen: list[int] = []
    issue = overlapped.Request.issue

    def spy(self, call):
        status = issue(self, call)
        seen.append(status)
        return status

    monkeypatch.setattr(overlapped.Request, "issue", spy)
    return seen


def test_c_2_1_what_ended_inline_brings_no_packet(inline, statuses):
    with inline() as adapter:
        region = adapter.register(bytearray(64))
        region.close()
        region = adapter.begin_register(bytearray(64)).result(0)
        region.begin_deregister().result(0)
        assert region.closed
        assert statuses == [SUCCESS] * 4


def test_c_2_1_a_connection_whose_every_step_is_inline(inline, statuses):
    """connect() and accept() wait inside the provider, so each side has a thread."""
    keep = Keeper()
    adapter = keep(inline(others_ms=5000))
    ends = [create_end(keep, adapter) for _ in range(2)]
    listener = keep(adapter.listen((host_of(adapter), 0)))

    def serve() -> ndpy.Connector:
        connector = keep(listener.get_request(DEADLINE_S))
        connector.accept(ends[1].queue_pair, timeout_s=DEADLINE_S)
        return connector

    server = Elsewhere(serve).start()
    client = keep(adapter.create_connector())
    client.connect(ends[0].queue_pair, listener.address, timeout_s=DEADLINE_S)
    client.complete_connect(DEADLINE_S)
    connector = server.result()
    # Four requests were pending: one on each side that waits for the end of the connection, and the listener's
    # own, once before it took a request and once after. The last one may still be inside the provider.
    wait_until(lambda: statuses.count(PENDING) >= 4, "four requests are pending")
    assert statuses.count(PENDING) == 4
    send_message(keep, ends[0], ends[1], b"inline")
    client.disconnect(DEADLINE_S)
    connector.wait_disconnected(DEADLINE_S)
    keep.close()


def test_c_2_1_requests_that_the_listener_gets_inline_are_served_once_each(inline):
    keep = Keeper()
    adapter = keep(inline(others_ms=100))
    listener = keep(adapter.listen((host_of(adapter), 0)))
    connectors = [keep(adapter.create_connector()) for _ in range(4)]

    def ask(number: int) -> None:
        end = create_end(keep, adapter)
        connectors[number].begin_connect(end.queue_pair, listener.address, private_data=b"%d" % number)

    with beside(*(functools.partial(ask, number) for number in range(len(connectors)))):
        asked = [keep(listener.get_request(DEADLINE_S)) for _ in connectors]
        assert sorted(request.private_data for request in asked) == [b"0", b"1", b"2", b"3"]
    keep.close()


@pytest.mark.parametrize("settings", [{}, {"phases": 1}], ids=["inline", "phases"])
def test_c_4_5_messages_pollers_and_closing(inline, settings):
    keep = Keeper()
    adapter = keep(inline(**settings))
    pair = connect_pair(keep, adapter)
    assert_works(keep, pair)
    poller = keep(ndpy.Poller())
    poller.add(pair.server.cq)
    for context in range(20):
        armed = pair.client.cq.arm()
        pair.server.queue_pair.receive([], context=context)
        pair.client.queue_pair.send([])
        ((_, completions),) = poller.wait(DEADLINE_S)
        assert [completion.context for completion in completions] == [context]
        armed.result(DEADLINE_S)
        take(pair.client.cq)
    watching = pair.server.connector.begin_wait_disconnected()
    pair.client.connector.disconnect(DEADLINE_S)
    watching.result(DEADLINE_S)
    keep.close()


def test_c_4_5_closing_between_two_phases(inline):
    """The first packet may be on its way when close() asks for the result, which begins the second phase."""
    for _ in range(30 if STRESS else 10):
        keep = Keeper()
        adapter = keep(inline(phases=1))
        pair = connect_pair(keep, adapter)
        armed = [pair.server.cq.arm() for _ in range(5)]
        poller = keep(ndpy.Poller())
        poller.add(pair.server.cq)
        with pytest.raises(ndpy.TimeoutError):
            poller.wait(0)
        pair.server.queue_pair.receive([])
        pair.client.queue_pair.send([])
        registering = [adapter.begin_register(bytearray(64)) for _ in range(5)]
        for pending in registering:
            pending.cancel()
            with contextlib.suppress(ndpy.CanceledError):
                keep(pending.result(0))
        keep.close()
        assert all(pending.done() for pending in armed)


def test_a_deregistration_that_failed_can_be_repeated(inline):
    with inline(busy=1) as adapter:
        region = adapter.register(bytearray(64), ndpy.Access.REMOTE_READ)
        with pytest.raises(ndpy.DeviceBusyError):
            region.begin_deregister().result(DEADLINE_S)
        assert not region.closed
        assert region.remote().length == 64
        region.close()
        assert region.closed


def test_closing_while_a_deregistration_fails_says_so_and_loses_nothing(inline):
    with inline(busy=1) as adapter:
        region = adapter.register(bytearray(64))
        pending = region.begin_deregister()
        try:
            region.close()
        except ndpy.DeviceBusyError:
            assert not region.closed
            region.close()
        with pytest.raises(ndpy.DeviceBusyError):
            pending.result(DEADLINE_S)
        assert region.closed


@pytest.mark.skipif(not STRESS, reason="with NDPY_STRESS=1 only: the contract's tests once more")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("phases", ["0", "1"])
def test_the_contract_holds(phases):
    arguments = ["tests/contract", "--adapter", "inline_provider0", "-q"]
    code = f"import pytest; sys.exit(pytest.main({[*arguments, '-p', 'no:cacheprovider', '--timeout', '60']!r}))"
    environment = {name: "" for name in os.environ if name.startswith("SOFTND_") or name == "NDPY_FAULTS"}
    done = child(
        code,
        patient(500),
        **environment,
        NDPY_PROVIDER=str(PROVIDERS / "inline_provider.dll"),
        INLINE_PHASES=phases,
        NDPY_STRESS="",
        NDPY_ADAPTER="",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
