"""The port of rank 0: what strangers and ranks gone wrong can send there. No adapter is used."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import threading
import time

import pytest
from kit.deadlines import patient
from kit.processes import free_port

from ndpy.fleet import compare
from ndpy.fleet.engines.rendezvous import Hub, join
from ndpy.fleet.engines.start import EngineError, Start

pytestmark = pytest.mark.timeout(patient(60))

WAIT_S = patient(10)


@pytest.fixture
def start():
    return Start("rendezvous", 1, 3, ("127.0.0.1",), free_port(), b"a secret")


@pytest.fixture
def hub(start):
    hub = Hub(start)
    yield hub
    hub.close()


def joined(hub: Hub, start: Start):
    """A rank that has joined. Its connection is in the test's hands."""
    found = []
    thread = threading.Thread(target=lambda: found.append(join(start, "n1", "1", WAIT_S)), daemon=True)
    thread.start()
    assert hub.receive(WAIT_S) == (1, {"joined": "n1", "version": "1"})
    thread.join(WAIT_S)
    return found[0]


def refused(hub: Hub, why: str, count: int = 1) -> bool:
    """Whether so many are refused for this reason before the deadline. None of them becomes a rank."""
    deadline = time.monotonic() + WAIT_S
    while hub.refused[f"127.0.0.1: {why}"] < count and time.monotonic() < deadline:
        assert hub.receive(0.05) is None
    return hub.refused[f"127.0.0.1: {why}"] == count


NONCE, PROOF = "a" * 32, "b" * 64
NO_RANK = "it is not a rank of `ndpy fleet`"
NO_JSON = "a message on the control connection is not JSON"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (json.dumps({"rank": 1, "nonce": "\ud800", "proof": PROOF}).encode(), NO_RANK),
        (json.dumps({"rank": 1, "nonce": NONCE, "proof": "\ud800" * 64}).encode(), NO_RANK),
        (
            json.dumps({"rank": 1, "nonce": NONCE, "proof": "\N{LATIN SMALL LETTER A WITH DIAERESIS}" * 64}).encode(),
            NO_RANK,
        ),
        (json.dumps({"rank": True, "nonce": NONCE, "proof": PROOF}).encode(), NO_RANK),
        (json.dumps({"rank": 1, "nonce": NONCE, "proof": PROOF}).encode(), "it does not know the token"),
        (b'{"rank":' + b"9" * 3900 + b"}", NO_RANK),
        (b"[" * 4000, NO_JSON),
        (b"\xff\xfe", NO_JSON),
        (b"[]", "a message on the control connection is not a JSON object"),
    ],
)
def test_a_stranger_is_refused_whatever_it_sends(hub, start, line, why):
    with socket.create_connection(("127.0.0.1", start.port), WAIT_S) as stranger:
        stranger.sendall(line + b"\n")
        assert refused(hub, why)
    joined(hub, start).close()


@pytest.mark.parametrize(
    ("rank", "why"), [(1, "rank 1 is there already"), (3, "there is no rank 3"), (-1, "there is no rank -1")]
)
def test_a_number_that_is_taken_or_that_no_rank_has_is_refused(hub, start, rank, why):
    """Also from somebody who knows the token, such as a job that was started twice. The first one stays."""
    first = joined(hub, start)
    told = []

    def second() -> None:
        try:
            join(dataclasses.replace(start, rank=rank), "n2", "1", WAIT_S).close()
        except EngineError as error:
            told.append(str(error))

    thread = threading.Thread(target=second, daemon=True)
    thread.start()
    assert refused(hub, why)
    thread.join(WAIT_S)
    assert why in told[0]
    assert hub.send(1, {"do": "there"})
    assert first.receive(WAIT_S) == {"do": "there"}
    first.close()


def test_ten_thousand_strangers_do_not_keep_a_rank_out(hub, start):
    count = 10_000

    def knock() -> None:
        for _ in range(count):
            # Some find the queue of the port full.
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", start.port), WAIT_S).close()

    strangers = threading.Thread(target=knock, daemon=True)
    strangers.start()
    joined(hub, start).close()
    assert hub.receive(WAIT_S) is not None
    while strangers.is_alive():
        hub.receive(0.01)
    hub.receive(0.2)
    assert sum(hub.refused.values()) > count * 0.9
    assert len(hub.notes()) <= 10


@pytest.mark.parametrize("message", [{"joined": ["x"]}, {"gone": 1}])
def test_a_rank_that_speaks_as_rank_0_is_lost(hub, start, message):
    channel = joined(hub, start)
    channel.send(message, WAIT_S)
    assert hub.receive(WAIT_S) == (1, {"gone": "it sent what only rank 0 may say"})
    channel.close()


def test_a_rank_that_sends_without_end_is_lost(hub, start):
    """Rank 0 reads no more of it, and neither waits nor keeps what it sent."""
    channel = joined(hub, start)

    def flood() -> None:
        with contextlib.suppress(Exception):
            while True:
                channel.send({"id": 0}, WAIT_S)

    threading.Thread(target=flood, daemon=True).start()
    deadline, kept = time.monotonic() + WAIT_S, 0
    while (got := hub.receive(0.2)) is None or "gone" not in got[1]:
        kept += got is not None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "messages at a time" in got[1]["gone"]
    channel.close()


@pytest.mark.parametrize(
    "hello", [{}, {"nonce": "\ud800"}, {"nonce": 5}, {"nonce": NONCE, "proof": "\ud800"}, {"nonce": NONCE}]
)
def test_a_rank_does_not_believe_another_program_at_the_port(start, hello):
    with socket.create_server(("127.0.0.1", start.port)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(json.dumps(hello).encode() + b"\n")
                if "nonce" in hello:
                    connection.recv(4096)
                connection.sendall(json.dumps(hello).encode() + b"\n")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(EngineError, match=r"belongs to another program|does not know the token"):
            join(start, "n1", "1", WAIT_S)


@pytest.mark.parametrize("findings", [5, "x", {"a": 1}, [5, None], None])
def test_findings_that_are_none_are_left_out(findings):
    """What a rank says of its machine is checked before it is used."""
    assert compare.of_machine([{"ends": [{"adapter": "soft0", "findings": findings, "facts": 7}, 3]}]) == ({}, ())
