"""Every example, run as its user runs it, in two processes. The tests check output, exit status and failures."""

from __future__ import annotations

import hashlib
import re
import runpy
import sys

import pytest
from kit.helpers import host_of, only_under_stress, require, sample
from kit.processes import EXAMPLES, Process, free_port, start_example
from kit.quirks import skip_where

import ndpy
from ndpy.vocabulary.quirks import Quirk

SERVERS = {
    "pingpong": ["server", "--port", 0],
    "file_server": ["serve", EXAMPLES / "file_server.py", "--port", 0],
    "many_clients": ["server", "--port", 0],
    "rping": ["-s", "-p", 0],
    "rc_pingpong": ["-p", 0],
    "echo": ["server", "--port", 0],
    "key_value_store": ["server", "--port", 0],
    "publish_array": ["publish", "--port", 0],
    "sharded_tensor": ["hold", "--port", 0],
    "block_transfer": ["server", "--port", 0],
}
CLIENTS = {
    "pingpong": ["client", "HOST", "--port", "PORT"],
    "file_server": ["fetch", "HOST", "--port", "PORT"],
    "many_clients": ["client", "HOST", "--port", "PORT", "--connections", 1],
    "rping": ["-c", "-a", "HOST", "-p", "PORT"],
    "rc_pingpong": ["HOST", "-p", "PORT"],
    "echo": ["client", "HOST", "--port", "PORT"],
    "key_value_store": ["get", "HOST", "colour", "--port", "PORT"],
    "publish_array": ["fetch", "HOST", "--port", "PORT"],
    "sharded_tensor": ["fetch", "HOST", "--port", "PORT"],
    "block_transfer": ["client", "HOST", "--port", "PORT"],
}


@pytest.fixture
def host(adapter) -> str:
    """The adapter's address. Connections to it go through the same adapter."""
    return host_of(adapter)


# Packages of others that an example needs.
NEEDS = {"publish_array": "numpy", "sharded_tensor": "numpy"}


def require_packages(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")


@pytest.fixture
def start(adapter):
    """Start an example on the adapter under test."""

    def start_on_adapter(name, *arguments) -> Process:
        if name == "rc_pingpong":
            require(adapter, ndpy.Capability.GIDS)
            skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
        option = "-d" if name == "rc_pingpong" else "--adapter"
        return start_example(name, *arguments, option, adapter.info.name)

    return start_on_adapter


def port_of(server: Process) -> str:
    return server.wait_for(r"listening on .*port (\d+)")[1]


def test_every_example_is_tested_here():
    """Those with asyncio also in test_asyncio_examples.py. perftest_peer has perftest at the other end:
    interop/test_perftest.py.
    """
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"hello", "perftest_peer"} == set(SERVERS) == set(CLIENTS)


def test_hello_writes_into_memory(monkeypatch, adapter):
    monkeypatch.setenv("NDPY_ADAPTER", adapter.info.name)
    with start_example("hello") as process:
        result = process.succeed()
    assert result.out == f"WRITE with context 7 has ended\nhello over RDMA on {adapter.info.name}\n"


@pytest.mark.parametrize(("size", "count"), sample([(64, 100), (100_000, 10), (1, 10)], 1))
def test_pingpong_verifies_both_directions_and_reports_latency(start, host, size, count):
    with start("pingpong", "server", "--port", 0) as server:
        options = ["--port", port_of(server), "--size", size, "--count", count]
        with start("pingpong", "client", host, *options) as client:
            ours = client.succeed()
        theirs = server.succeed()
    assert f"verified {count} round trips of {size} bytes" in ours.out
    times = re.search(r"least ([\d.]+), median ([\d.]+), 99 % ([\d.]+), most ([\d.]+)", ours.out)
    assert 0 < float(times[1]) <= float(times[2]) <= float(times[3]) <= float(times[4])
    assert f"verified {count} messages of {size} bytes" in theirs.out
    assert not ours.err
    assert not theirs.err


@only_under_stress
def test_pingpong_server_refuses_sizes_beyond_its_limit(start, host):
    with start("pingpong", "server", "--port", 0, "--max-size", 100) as server:
        with start("pingpong", "client", host, "--port", port_of(server), "--size", 101) as client:
            assert_one_line_error(client.finish(), "pingpong")
        assert_one_line_error(server.finish(), "pingpong", "the client asked for 101 bytes")


@pytest.mark.parametrize("size", sample([300_001, 3_000_001, 1, 4096], 1))
def test_file_is_read_whole_and_refused_after_revocation(start, adapter, host, tmp_path, size):
    original, copy = tmp_path / "original", tmp_path / "copy"
    original.write_bytes(bytes(i * i % 251 for i in range(1000)) * (size // 1000) + b"\xff" * (size % 1000))
    with start("file_server", "serve", original, "--port", 0, "--once") as server:
        with start("file_server", "fetch", host, "--port", port_of(server), "--output", copy) as client:
            ours = client.succeed()
        theirs = server.succeed()
    assert copy.read_bytes() == original.read_bytes()
    assert f"SHA-256 verified: {hashlib.sha256(original.read_bytes()).hexdigest()}" in ours.out
    assert "read after revocation refused" in ours.out
    if ndpy.Capability.MEMORY_WINDOWS in adapter.info.capabilities:
        assert "refused: ACCESS_VIOLATION" in ours.out
        assert "window invalidated" in theirs.out
    else:
        assert "no windows on this adapter: region deregistered" in theirs.out


@only_under_stress
def test_file_server_goes_on_after_a_client_and_keeps_the_file_as_it_was(start, host, tmp_path):
    original = tmp_path / "original"
    original.write_bytes(b"contents" * 1000)
    with start("file_server", "serve", original, "--port", 0) as server:
        port = port_of(server)
        for _ in range(2):
            with start("file_server", "fetch", host, "--port", port) as client:
                client.succeed()
        server.interrupt()
        result = server.finish()
    assert result.out.count("served ") == 2
    assert original.read_bytes() == b"contents" * 1000


def test_file_server_says_what_is_wrong_with_the_file(adapter, run_here, tmp_path):
    empty = tmp_path / "empty"
    empty.touch()
    for path, reason in ((empty, "is empty"), (tmp_path / "absent", "No such file")):
        message = run_here("file_server", "serve", path, "--port", 0, "--adapter", adapter.info.name)
        assert message.startswith("file_server: ")
        assert reason in message


def test_many_clients_are_served_on_one_completion_queue(start, host):
    with start("many_clients", "server", "--port", 0, "--until", 9) as server:
        options = ["--port", port_of(server), "--messages", 30]
        clients = [start("many_clients", "client", host, *options, "--connections", count) for count in (4, 5)]
        with clients[0], clients[1]:
            results = [client.succeed() for client in clients]
        result = server.succeed()
    for count, ours in zip((4, 5), results, strict=True):
        assert f"verified 30 answers on each of {count} connections" in ours.out
    totals = [sum(seed * 1000 + i for i in range(30)) for count in (4, 5) for seed in range(count)]
    assert sorted(map(int, re.findall(r"left, total (\d+)", result.out))) == sorted(totals)


@only_under_stress
def test_server_survives_a_killed_client_and_reuses_its_slots(start, host):
    with start("many_clients", "server", "--port", 0, "--slots", 8, "--until", 6) as server:
        options = ["--port", port_of(server), "--messages"]
        with start("many_clients", "client", host, *options, 1_000_000, "--connections", 3) as client:
            server.wait_for(r"(?s)(came.*){3}")
            client.popen.kill()
            client.finish()
        # Without a shared receive queue, the server refuses a client while it has no slots for it.
        server.wait_for(r"(?s)((left|failed).*){3}")
        with start("many_clients", "client", host, *options, 20, "--connections", 3) as client:
            client.succeed()
        server.succeed()


@only_under_stress
@pytest.mark.parametrize("size", sample([23, 65535, 64], 1))
def test_rping_example_talks_to_itself(start, host, size):
    with start("rping", "-s", "-p", 0) as server:
        with start("rping", "-c", "-a", host, "-p", port_of(server), "-C", 5, "-S", size) as client:
            assert f"5 rounds of {size} bytes verified" in client.succeed().out
        assert "5 rounds verified" in server.succeed().out


@only_under_stress
def test_rc_pingpong_example_talks_to_itself(start):
    with start("rc_pingpong", "-p", 0, "-n", 50, "-c") as server:
        with start("rc_pingpong", "-p", port_of(server), "-n", 50, "127.0.0.1") as client:
            assert "50 iters of 4096 bytes verified" in client.succeed().out
        assert "50 iters of 4096 bytes verified" in server.succeed().out


@pytest.mark.parametrize("name", sample(list(SERVERS), 1))
def test_client_says_in_one_line_that_nobody_listens(start, host, name):
    require_packages(name)
    words = {"HOST": host, "PORT": free_port()}
    with start(name, *(words.get(word, word) for word in CLIENTS[name])) as client:
        assert_one_line_error(client.finish(), name)


@pytest.mark.parametrize("name", sample(list(SERVERS), 2))
def test_waiting_server_ends_at_once_on_ctrl_c(start, name):
    require_packages(name)
    with start(name, *SERVERS[name]) as server:
        port_of(server)
        server.interrupt()
        result = server.finish()
    assert result.status == 130
    assert not result.err


@pytest.mark.parametrize("name", SERVERS)
def test_adapter_that_does_not_exist_is_told_in_one_line(adapter, run_here, name):
    require_packages(name)
    option = "-d" if name == "rc_pingpong" else "--adapter"
    message = run_here(name, *SERVERS[name], option, "nonesuch0")
    assert message.startswith(f"{name}: ")
    assert "nonesuch0" in message
    assert adapter.info.name in message


@pytest.mark.parametrize("name", SERVERS)
def test_help_tells_how_to_start_it(run_here, capsys, name):
    require_packages(name)
    assert run_here(name, "--help") == 0
    assert f"python {name}.py" in capsys.readouterr().out


@pytest.fixture
def run_here(monkeypatch):
    """Run an example in this process, because that is quicker. Returns its argument to sys.exit()."""

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return exit.value.code

    return run


def assert_one_line_error(result, name, part=""):
    assert result.status == 1, result
    lines = result.err.strip().splitlines()
    assert len(lines) == 1, result.err
    assert lines[0].startswith(f"{name}: ")
    assert part in lines[0]
