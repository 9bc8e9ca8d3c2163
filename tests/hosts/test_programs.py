"""Programs on two hosts: the examples, the programs whose protocols they speak, and the commands with --peer.

Servers run on the other host, clients on this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interop.test_rc_pingpong import check_both_know_both, routable_gids
from interop.test_rping import lines_of
from kit.deadlines import patient
from kit.helpers import only_under_stress, require, sample
from kit.processes import EXAMPLES, Process, start_example, start_installed, start_python
from kit.quirks import skip_where

import ndpy
from ndpy.platforms.verbs import distribution
from ndpy.tools.cli.smoke import catalog
from ndpy.vocabulary.quirks import Quirk

pytestmark = pytest.mark.timeout(300)
NDPY = str(Path(ndpy.__file__).with_name("__main__.py"))
RPING = ("rping", distribution.CONNECTION_PROGRAMS)
RC_PINGPONG = ("ibv_rc_pingpong", distribution.VERBS_PROGRAMS)
# Emulated machines are slow.
LIMIT_S = 200
# How long a program may take to say that the peer's host is not there: 10 s for its attempt, and its start.
ABSENT_LIMIT_S = patient(25)
PORT_OF_NOBODY = 7471

# hello has both ends in one program.
LOCAL_ONLY = {"hello"}
SERVERS: dict[str, list[Any]] = {
    "file_server": ["serve", "FILE", "--once", "--port", 0],
    "pingpong": ["server", "--port", 0],
    "many_clients": ["server", "--port", 0, "--until", 3],
    "rping": ["-s", "-p", 0],
    "rc_pingpong": ["-p", 0, "-n", 50],
    "perftest_peer": ["send_lat", "-p", 0, "-n", 50],
    "echo": ["server", "--port", 0, "--until", 3],
    "key_value_store": ["server", "--port", 0, "--until", 2],
    "publish_array": ["publish", "--port", 0, "--versions", 2, "--interval", 0.1],
    "sharded_tensor": ["hold", "--port", 0, "--until", 1],
    "block_transfer": ["server", "--port", 0, "--until", 1],
}
CLIENTS: dict[str, list[Any]] = {
    "file_server": ["fetch", "HOST", "--port", "PORT"],
    "pingpong": ["client", "HOST", "--port", "PORT", "--size", 10007, "--count", 20],
    "many_clients": ["client", "HOST", "--port", "PORT", "--connections", 3, "--messages", 20],
    "rping": ["-c", "-a", "HOST", "-p", "PORT", "-S", 10007, "-C", 5],
    "rc_pingpong": ["HOST", "-p", "PORT", "-n", 50],
    "perftest_peer": ["send_lat", "HOST", "-p", "PORT", "-n", 50],
    "echo": ["client", "HOST", "--port", "PORT", "--connections", 3, "--size", 10007, "--count", 20],
    "key_value_store": ["measure", "HOST", "--port", "PORT", "--count", 20, "--keys", 5],
    "publish_array": ["subscribe", "HOST", "--port", "PORT"],
    "sharded_tensor": ["fetch", "HOST", "--port", "PORT"],
    "block_transfer": ["client", "HOST", "--port", "PORT"],
}
# These connect without a connection manager.
BY_NUMBER = ("rc_pingpong", "perftest_peer")
# What the server and the client say when they have compared what came with what was sent. perftest_peer only measures.
VERIFIED = {
    "file_server": ["served ", "SHA-256 verified: "],
    "pingpong": ["verified 20 messages of 10007 bytes", "verified 20 round trips of 10007 bytes"],
    "many_clients": ["left, total 40190\n", "verified 20 answers on each of 3 connections"],
    "rping": ["5 rounds verified", "5 rounds of 10007 bytes verified"],
    "rc_pingpong": ["50 iters of 4096 bytes verified", "50 iters of 4096 bytes verified"],
    "perftest_peer": ["send_lat: 50 times 2 bytes", "send_lat: 50 times 2 bytes"],
    "echo": [" has left\n", "verified 20 echoes of 10007 bytes on each of 3 connections"],
    "key_value_store": [" has left\n", "verified 40 gets, half of them during puts"],
    "publish_array": ["published 2 versions", "received 2 versions"],
    "sharded_tensor": [" has left\n", "verified 1000 rows of 512 columns from 1 holders"],
    "block_transfer": [" has left, 4096 blocks are free\n", "verified 10 times 256 blocks of 4096 bytes"],
}
FILE = bytes(i * i % 251 for i in range(1000)) * 300


@pytest.fixture
def there(peer_host) -> Callable[..., Any]:
    """there(name, ...) calls a function of kit/processes.py on the other host."""
    return lambda name, *arguments: peer_host.call(f"kit.processes:{name}", *arguments)


def require_no_manager(adapter: ndpy.Adapter) -> None:
    """Skip where queue pairs cannot be connected without a connection manager."""
    require(adapter, ndpy.Capability.GIDS)
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)


def option_of(name: str, adapter_name: str) -> list[str]:
    return ["-d" if name in BY_NUMBER else "--adapter", adapter_name]


def filled(words: list[Any], **values: object) -> list[Any]:
    return [values.get(word, word) for word in words]


def port_of(server: Process) -> str:
    return server.wait_for(r"listening on .*port (\d+)")[1]


# ---- with the programs of rdmacm-utils and ibverbs-utils ----


@pytest.mark.parametrize(("size", "count"), sample([(10007, 5), (65535, 20)], 1))
def test_our_rping_client_verifies_what_rping_writes(adapter_name, there, peer_address, size, count):
    port = there("free_port")
    options = ["-a", peer_address, "-p", port, "-S", size]
    with there("start_installed", *RPING, "-s", "-v", *options) as server:
        there("wait_for_rdma_listener", server, port)
        with start_example("rping", "-c", "-v", *options, "-C", count, "--adapter", adapter_name) as client:
            ours = client.succeed()
        theirs = server.succeed()
    assert f"{count} rounds of {size} bytes verified" in ours.out
    pings = lines_of(ours.out, "ping data: ")
    assert len(pings) == count
    assert lines_of(theirs.out, "server ping data: ") == pings


@pytest.mark.parametrize(("size", "count"), sample([(10007, 5), (65535, 20)], 1))
def test_rping_client_verifies_what_our_server_writes(adapter_name, there, peer_address, size, count):
    with there("start_example", "rping", "-s", "-v", "-a", peer_address, "-p", 0, "--adapter", adapter_name) as server:
        options = ["-c", "-v", "-V", "-a", peer_address, "-p", port_of(server), "-S", size, "-C", count]
        with start_installed(*RPING, *options) as client:
            theirs = client.succeed()
        ours = server.succeed()
    assert f"{count} rounds verified" in ours.out
    pings = lines_of(theirs.out, "ping data: ")
    assert len(pings) == count
    assert lines_of(ours.out, "server ping data: ") == pings


@only_under_stress
def test_our_client_talks_to_ibv_rc_pingpong(adapter, there, peer_host, peer_address):
    require_no_manager(adapter)
    name, port = adapter.info.name, there("free_port")
    common = ["-d", name, "-p", port, "-s", 10007, "-n", 50]
    with peer_host.call("ndpy:open_adapter", name) as theirs:
        gid_index = routable_gids(theirs)[0].index
    with there("start_installed", *RC_PINGPONG, *common, "-g", gid_index) as server:
        there("wait_for_tcp_listener", server, port)
        with start_example("rc_pingpong", *common, peer_address) as client:
            ours = client.succeed()
        check_both_know_both(ours, server.succeed())


def test_ibv_rc_pingpong_talks_to_our_server(adapter, there, peer_address):
    require_no_manager(adapter)
    common = ["-d", adapter.info.name, "-s", 10007, "-n", 50]
    with there("start_example", "rc_pingpong", *common, "-p", 0) as server:
        options = [*common, "-p", port_of(server), "-g", routable_gids(adapter)[0].index]
        with start_installed(*RC_PINGPONG, *options, peer_address) as client:
            theirs = client.succeed()
        check_both_know_both(server.succeed(), theirs)


# ---- the examples ----


def test_every_example_is_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} - LOCAL_ONLY == set(SERVERS) == set(CLIENTS) == set(VERIFIED)


@pytest.mark.parametrize("name", sample(list(SERVERS), 1))
def test_an_example_verifies_what_comes_from_the_other_host(adapter, there, peer_host, peer_address, tmp_path, name):
    if name in BY_NUMBER:
        require_no_manager(adapter)
    option, copy = option_of(name, adapter.info.name), tmp_path / "copy"
    with (
        file_there(peer_host) as file,
        there("start_example", name, *filled(SERVERS[name], FILE=file), *option) as server,
    ):
        words = filled(CLIENTS[name], HOST=peer_address, PORT=port_of(server))
        if name == "file_server":
            words += ["--output", copy]
        with start_example(name, *words, *option) as client:
            ours = client.succeed()
        theirs = server.succeed()
    assert VERIFIED[name][0] in theirs.out
    assert VERIFIED[name][1] in ours.out
    assert not ours.err
    assert not theirs.err
    if name == "file_server":
        assert f"SHA-256 verified: {hashlib.sha256(FILE).hexdigest()}\n" in ours.out
        assert "read after revocation refused" in ours.out
        assert copy.read_bytes() == FILE


@contextlib.contextmanager
def file_there(peer_host) -> Iterator[str]:
    """The name of a file on the other host that contains FILE."""
    with peer_host.call("tempfile:NamedTemporaryFile") as file:
        file.write(FILE)
        file.flush()
        yield file.name


# ---- the commands ----


@pytest.fixture
def serving(there, adapter_name, local_address, peer_address):
    """serving(command) is `ndpy COMMAND --serve` on the other host, with HOST:PORT. It must end cleanly when
    interrupted.
    """

    @contextlib.contextmanager
    def serve(command: str) -> Iterator[str]:
        words = [command, "--serve", "--listen", f"{peer_address}:0", adapter_name]
        with there("start_python", NDPY, *words) as server:
            yield f"{peer_address}:{server.wait_for(r': serving .*:([0-9]+)[.] Press')[1]}"
            server.interrupt()
            result = server.succeed()
        assert not result.err
        assert f"client {local_address} " in result.out
        assert "dropped" not in result.out

    return serve


def test_every_check_of_smoke_passes_or_is_known(adapter_name, serving, tmp_path):
    path = tmp_path / "out.json"
    with (
        serving("smoke") as peer,
        start_python(NDPY, "smoke", "--peer", peer, "--timeout", 60, "--json", path, adapter_name) as process,
    ):
        process.succeed(LIMIT_S)
    report = json.loads(path.read_text())
    assert {(check["group"], check["name"]) for check in report["checks"]} == {
        (check.group, check.name) for check in catalog.load()
    }
    for check in report["checks"]:
        assert check["verdict"] in ("PASS", "KNOWN", "SKIP"), check
        if check["verdict"] == "SKIP":
            lacking = re.fullmatch(rf"{adapter_name} does not claim (\w+)", check["reason"])
            if lacking:
                assert lacking[1] not in report["capabilities"]
            else:
                assert report["transport"] == "iWARP"
                assert "is iWARP, which has no way" in check["reason"]


@only_under_stress
@pytest.mark.parametrize("test", ["write_lat", "send_bw"])
def test_perf_measures_between_the_hosts(adapter_name, serving, peer_address, tmp_path, test):
    path = tmp_path / "out.json"
    with serving("perf") as peer:
        words = [test, adapter_name, "--peer", peer, "--iterations", 20, "--warm-up", 5, "--size", "8K", "--json", path]
        with start_python(NDPY, "perf", *words) as process:
            process.succeed(LIMIT_S)
    report = json.loads(path.read_text())
    assert report["passed"]
    assert peer_address in report["peer"]["addresses"]
    (row,) = report["results"]
    assert row["bytes"] == 8192
    assert row["iterations"] >= 20


# ---- nobody there ----


@pytest.fixture
def absent(peer_address) -> str:
    """An address of the network that no host has."""
    return f"{peer_address.rpartition('.')[0]}.77"


@pytest.mark.parametrize("words", sample([["smoke", "--only", "connect"], ["perf", "write_lat"]], 1), ids=" ".join)
def test_a_command_says_that_no_peer_is_there(adapter_name, absent, words):
    with start_python(NDPY, *words, "--peer", absent, adapter_name) as process:
        result = process.finish()
    assert result.status == 1
    (line,) = set(re.findall(r"no peer at .*", result.out + result.err))
    assert f"no peer at {absent}: " in line
    assert line.endswith(f"; start `ndpy {words[0]} --serve` there, and let its port through the firewall")
    assert "PASS" not in result.out
    assert result.seconds < ABSENT_LIMIT_S


@pytest.mark.parametrize("name", sample(list(CLIENTS), 1))
def test_an_example_says_that_no_server_is_there(adapter, absent, name):
    if name in BY_NUMBER:
        require_no_manager(adapter)
    words = filled(CLIENTS[name], HOST=absent, PORT=PORT_OF_NOBODY)
    with start_python(EXAMPLES / f"{name}.py", *words, *option_of(name, adapter.info.name)) as process:
        result = process.finish()
    assert result.status == 1
    (line,) = result.err.splitlines()
    assert line.startswith(f"{name}: ")
    assert absent in line
    assert "check the address" in line
    assert result.seconds < ABSENT_LIMIT_S
