"""softnd under Wine and soft0 on this machine, which share the engine but neither the face nor the system.

rping is softnd's own program on softnd's side, and rdma-core's on soft0's. ndpy's examples run on both. All data are
verified.
"""

from __future__ import annotations

import re

import hostile
import pytest
from conftest import share
from conversations import (
    EXAMPLES,
    assert_client_verified,
    assert_server_verified,
    client_of,
    example_on_soft0,
    example_on_softnd,
    rping_on_soft0,
    server_of,
    wait_until_listening,
)
from hostile import ROOT, WindowsProcess
from kit.processes import free_port

ROUNDS = 30
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(2 * LIMIT_S)


@pytest.fixture(scope="module")
def rping_on_softnd():
    """Call it with rping's role, port and size."""
    program = hostile.windows_program("rping")

    def run(role: str, port: int, size: int) -> WindowsProcess:
        rounds = ROUNDS if role == "client" else 0
        return WindowsProcess(program, hostile.dll(), role, "127.0.0.1", port, size, rounds, limit_s=LIMIT_S)

    return run


@pytest.mark.parametrize("size", [64, 65535])
def test_softnd_client_verifies_what_rping_server_on_soft0_writes(rping_on_softnd, size):
    port = free_port()
    with rping_on_soft0("-s", "-a", "127.0.0.1", "-p", port, "-S", size) as server:
        wait_until_listening(server, port)
        with rping_on_softnd("client", port, size) as client:
            assert client.finish() == 0, client.lines
        assert client.lines == [f"client: {ROUNDS} rounds of {size} bytes verified"]
        assert server.finish() == 0, server.lines


@pytest.mark.parametrize("size", [64, 65535])
def test_rping_client_on_soft0_verifies_what_softnd_server_writes(rping_on_softnd, size):
    port = free_port()
    with rping_on_softnd("server", port, 65535) as server:
        assert server.next_line().startswith("listening")
        with rping_on_soft0("-c", "-V", "-a", "127.0.0.1", "-p", port, "-S", size, "-C", ROUNDS) as client:
            assert client.finish() == 0, client.lines
        assert server.finish() == 0, server.lines
    assert server.lines[1:] == [f"server: {ROUNDS} rounds verified"]


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("server_on", ["soft0", "softnd"])
def test_examples_talk_to_each_other(name, server_on):
    hostile.windows_program("rping")  # skips if Wine is missing
    port = free_port()
    if server_on == "soft0":
        server = example_on_soft0(server_of(name), port)
    else:
        server = example_on_softnd(server_of(name), port, LIMIT_S)
    with server:
        assert "listening" in server.next_line()
        if server_on == "soft0":
            client = example_on_softnd(client_of(name, "127.0.0.1"), port, LIMIT_S)
        else:
            client = example_on_soft0(client_of(name, "127.0.0.1"), port)
        with client:
            assert client.finish() == 0, client.lines
        assert server.finish() == 0, server.lines
    assert_client_verified(name, client.lines)
    assert_server_verified(name, server.lines)


# ---- with ndpy.aio: the server's arguments, then for each client its arguments, and what the last line of its output
# matches ----

ASYNCIO = {
    "echo": (
        ["server", "--until", 4],
        [
            (["client", "HOST", "--connections", 2, "--count", 20], r"round trip in us"),
            (["client", "HOST", "--connections", 2, "--count", 5, "--size", 100_000], r"round trip in us"),
        ],
    ),
    "key_value_store": (
        ["server", "--until", 4],
        [
            (["put", "HOST", "colour", "blue"], r"put colour"),
            (["get", "HOST", "colour"], r"blue"),
            (["measure", "HOST", "--count", 20, "--keys", 5], r"verified 40 gets, half of them during puts"),
        ],
    ),
    "publish_array": (
        ["publish", "--versions", 3, "--interval", 0.1],
        [(["subscribe", "HOST"], r"received 3 versions")],
    ),
}


ALL_TALKS = [(end, name) for end in ("soft0", "softnd") for name in ASYNCIO]
TALKS = [("soft0", "echo"), ("softnd", "key_value_store"), ("soft0", "publish_array")]


@pytest.mark.parametrize(("server_on", "name"), share(ALL_TALKS, TALKS))
def test_examples_with_asyncio_talk_to_each_other(server_on, name):
    hostile.windows_program("rping")  # skips if Wine is missing
    port = free_port()
    words, clients = ASYNCIO[name]

    def start(end, words):
        example = ROOT / f"examples/{name}.py", ["127.0.0.1" if word == "HOST" else word for word in words]
        return example_on_soft0(example, port) if end == "soft0" else example_on_softnd(example, port, LIMIT_S)

    with start(server_on, words) as server:
        assert "listening" in server.next_line()
        for arguments, expected in clients:
            with start("softnd" if server_on == "soft0" else "soft0", arguments) as client:
                assert client.finish() == 0, client.lines
            assert re.match(expected, client.lines[-1]), client.lines
        assert server.finish() == 0, server.lines
