"""Anybody may answer at --peer HOST. What comes from there is checked, short and printable before anybody reads it."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from ndpy import Operation, Status
from ndpy.tools.cli.channel import BadRequest, Channel, printable
from ndpy.tools.cli.peers import PeerDescription, PeerLost, PeerRefused
from ndpy.tools.cli.smoke.peer import Peer, read_completions, read_link
from ndpy.tools.cli.smoke.server import PROTOCOL, ClientSession

HELLO = {
    "version": "0.1.0", "host": "b", "system": "Linux 6.1", "adapter": "rxe0", "provider": "verbs",
    "driver": "rdma_rxe",
    "transport": "RoCE", "addresses": ["192.0.2.2"],
}  # fmt: skip
STEERS = "\x1b]0;owned\x07\x1b[2J\u202e\r\nPASS  all is well" + "x" * 5000


@pytest.fixture
def peer_that_says(monkeypatch):
    """Call with the answers of a peer, one for each command after the other. Returns a client of it."""
    opened = []

    def begin(*answers):
        ours, theirs = socket.socketpair()
        monkeypatch.setattr("ndpy.tools.cli.peers.dial", lambda *arguments: ours)
        server = Channel(theirs, line_limit=1 << 20)
        opened.append(server)

        def serve():
            for answer in answers:
                server.receive(10.0)
                server.send(answer, 10.0)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            client = Peer("rxe0", "192.0.2.2")
        except BaseException:
            thread.join(10)
            raise
        opened.append(client)
        return client

    yield begin
    for one in opened:
        one.close()


def harmless(text, longest=600):
    return text.isprintable() and len(text) <= longest


def test_text_is_made_printable_and_short():
    assert printable("a\tb\nc\x1b[2J\u202ed") == "a b c?[2J?d"
    assert printable("x" * 11, 10) == "x" * 10 + "..."
    assert printable("\u00e4\u4e2d") == "\u00e4\u4e2d"
    assert printable(None) == "None"


@pytest.mark.parametrize("field", [name for name in HELLO if name != "addresses"])
def test_what_the_peer_says_about_itself_steers_no_terminal(peer_that_says, field):
    peer = peer_that_says(HELLO | {field: STEERS})
    assert all(harmless(str(part)) for part in vars(peer.description).values())
    assert harmless(peer.where)


def test_only_addresses_are_addresses():
    said = ["192.0.2.2", "fe80::1%eth0", "\x1b[2J", "fe80::1%\x1b", "1" * 100, "not one", ""] + ["192.0.2.3"] * 100
    found = PeerDescription.from_answer(HELLO | {"addresses": said}).addresses
    assert set(found) == {"192.0.2.2", "fe80::1%eth0", "192.0.2.3"}
    assert len(found) < 64


@pytest.mark.parametrize(
    "answer", [{}, HELLO | {"addresses": 5}, HELLO | {"addresses": [5]}, HELLO | {"addresses": "192.0.2.2"}]
)
def test_an_answer_that_is_no_hello_is_refused(peer_that_says, answer):
    with pytest.raises(PeerLost, match="not as `ndpy smoke --serve` of this version"):
        peer_that_says(answer)


def test_a_refusal_in_the_peers_words_is_printable(peer_that_says):
    with pytest.raises(PeerLost) as caught:
        peer_that_says({"error": STEERS, "text": STEERS})
    assert harmless(str(caught.value))
    peer = peer_that_says(HELLO, {"error": STEERS, "text": STEERS})
    with pytest.raises(PeerRefused) as refused:
        peer.link()
    assert harmless(str(refused.value), 700)


@pytest.mark.parametrize(
    "link", [None, [], STEERS, {STEERS: 1}, {"link_mtu": STEERS}, {"pfc": [STEERS]}, {"addresses": STEERS}]
)
def test_a_description_that_makes_no_sense_fails_the_check(link):
    with pytest.raises(PeerRefused) as caught:
        read_link({"link": link})
    assert harmless(str(caught.value))


def test_a_view_has_addresses_only(peer_that_says):
    peer = peer_that_says(HELLO, {"own": STEERS, "other": {"x": 1}, "own_gid": 5, "other_gid": "192.0.2.1"})
    from ndpy.tools.cli.smoke.peer import PeerConnectionEnd

    far = PeerConnectionEnd.__new__(PeerConnectionEnd)
    far.peer, far.number = peer, 1
    view = far.view()
    assert (view.own, view.other, view.own_gid, view.other_gid) == (None, None, None, "192.0.2.1")
    assert view.addresses == ("192.0.2.2",)


def test_failures_of_the_peer_are_printable_and_few(peer_that_says):
    failures = peer_that_says(HELLO, {"failures": [STEERS[:700]] * 100}).reset()
    assert len(failures) == 64
    assert all(harmless(failure) for failure in failures)


def test_completions_are_read():
    (found,) = read_completions({"completions": [[1, "SEND", "SUCCESS", 5]]})
    assert (found.context, found.operation, found.status, found.nbytes) == (1, Operation.SEND, Status.SUCCESS, 5)


@pytest.mark.parametrize(
    "completion",
    [[1, STEERS, "SUCCESS", 5], [1, "SEND", STEERS, 5], [STEERS, "SEND", "SUCCESS", 5], [1, "SEND", "SUCCESS", -1], [1],
     5, None],
)  # fmt: skip
def test_completions_that_make_no_sense_fail_the_check(completion):
    with pytest.raises(PeerRefused) as caught:
        read_completions({"completions": [completion]})
    assert harmless(str(caught.value), 700)


def test_an_older_client_is_told_to_install_the_same_version():
    session = ClientSession(SimpleNamespace(info=None))
    with pytest.raises(
        BadRequest, match=f"speaks version {PROTOCOL} .* the other side version 1. Install the same ndpy"
    ):
        session.answer({"command": "hello", "protocol": 1})
    assert PROTOCOL > 1


def test_an_older_peers_refusal_reaches_the_user(peer_that_says):
    said = "this side speaks version 1 of the protocol of `ndpy smoke`, the other side version 2. Install the same ndpy"
    with pytest.raises(PeerLost, match="Install the same ndpy"):
        peer_that_says({"error": "BadRequest", "text": said})
