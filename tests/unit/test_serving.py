"""Where `--serve` listens."""

from __future__ import annotations

import contextlib
import errno
import socket

import pytest

from ndpy.tools.cli import serving

FAR = "198.51.100.77"


@pytest.mark.parametrize(
    ("addresses", "places"),
    [
        (("192.0.2.1", "192.0.2.2", "fe80::1%eth0"), ["192.0.2.1", "192.0.2.2", "fe80::1%eth0"]),
        (("192.0.2.1", "127.0.0.1"), ["0.0.0.0"]),
        (("192.0.2.1", "127.0.0.1", "::1"), ["0.0.0.0", "::"]),
        (tuple(f"192.0.2.{number}" for number in range(1, 20)), ["0.0.0.0"]),
    ],
)
def test_without_a_host_it_is_every_address_of_the_adapter(addresses, places):
    assert serving._places(addresses, "") == places
    assert serving._places(addresses, "192.0.2.9") == ["192.0.2.9"]


def listening(hosts, port=0):
    with contextlib.ExitStack() as stack:
        return [stack.enter_context(one).getsockname() for one in serving._listen_at(hosts, port)]


def test_all_have_one_port():
    first, second = listening(["127.0.0.1", "::1"])
    assert (first[0], second[0], first[1]) == ("127.0.0.1", "::1", second[1])


@pytest.mark.parametrize("hosts", [[FAR, "127.0.0.1"], ["127.0.0.1", FAR]])
def test_an_address_that_has_gone_keeps_the_others_from_nothing(hosts):
    assert [place[0] for place in listening(hosts)] == ["127.0.0.1"]


def test_if_none_is_there_the_error_names_the_last():
    with pytest.raises(OSError, match=FAR) as caught:
        listening(["198.51.100.78", FAR])
    assert caught.value.errno == errno.EADDRNOTAVAIL


def test_a_port_that_is_taken_at_the_next_address_is_not_kept(monkeypatch):
    """A free port is chosen again. One that was asked for is an error, and nothing is left open."""
    made = []
    create = socket.create_server

    def taken_once(address, **options):
        if address[0] == "::1" and len(made) == 1:
            made.append(None)
            raise OSError(errno.EADDRINUSE, "Address already in use")
        made.append(create(address, **options))
        return made[-1]

    monkeypatch.setattr(socket, "create_server", taken_once)
    first, second = listening(["127.0.0.1", "::1"])
    assert first[1] == second[1] != 0
    assert made[0].fileno() == -1 and len(made) == 4
    made.clear()
    with pytest.raises(OSError, match="Address already in use"):
        listening(["127.0.0.1", "::1"], first[1])
    assert made[0].fileno() == -1


def test_clients_are_told_addresses_and_no_wildcard():
    with serving._listen_at(["0.0.0.0"], 0)[0] as listener:
        port = listener.getsockname()[1]
        own = ("192.0.2.1", "127.0.0.1", "::1")
        assert list(serving._reached_at([listener], own)) == [f"192.0.2.1:{port}", f"127.0.0.1:{port}"]
