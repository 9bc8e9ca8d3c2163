"""The rping example against rdmacm-utils' rping, in both roles."""

from __future__ import annotations

import pytest
from kit.helpers import STRESS, host_of, only_under_stress, sample
from kit.processes import free_port, start_example, start_program, wait_for_rdma_listener

from ndpy.platforms.verbs import distribution

# rping's default size, its greatest, its least, and a prime number.
SIZES_AND_COUNTS = sample([(64, 10), (65535, 3), (23, 3), (10007, 3)], 1)


def lines_of(text: str, label: str) -> list[str]:
    return [line.removeprefix(label) for line in text.splitlines() if line.startswith(label)]


@pytest.mark.parametrize(("size", "count"), SIZES_AND_COUNTS)
def test_rping_client_validates_what_our_server_writes(adapter, pytestconfig, size, count):
    address = host_of(adapter)
    with start_example("rping", "-s", "-v", "-a", address, "-p", 0, "--adapter", adapter.info.name) as server:
        port = server.wait_for(r"listening on \S+ port (\d+)")[1]
        options = ["-c", "-v", "-V", "-a", address, "-p", port, "-S", size, "-C", count]
        with start_program(pytestconfig, "rping", distribution.CONNECTION_PROGRAMS, *options) as client:
            theirs = client.succeed()
        ours = server.succeed()
    assert f"{count} rounds verified" in ours.out
    pings = lines_of(theirs.out, "ping data: ")
    assert [line.partition(": ")[0] for line in pings] == [f"rdma-ping-{number}" for number in range(count)]
    assert lines_of(ours.out, "server ping data: ") == pings


@pytest.mark.parametrize(("size", "count"), SIZES_AND_COUNTS)
def test_our_client_verifies_what_rping_server_writes(adapter, pytestconfig, size, count):
    address, port = host_of(adapter), free_port()
    options = ["-s", "-v", "-a", address, "-p", port, "-S", size]
    with start_program(pytestconfig, "rping", distribution.CONNECTION_PROGRAMS, *options) as server:
        wait_for_rdma_listener(server, port)
        options = ["-c", "-v", "-a", address, "-p", port, "-S", size, "-C", count]
        with start_example("rping", *options, "--adapter", adapter.info.name) as client:
            ours = client.succeed()
        theirs = server.succeed()
    assert f"{count} rounds of {size} bytes verified" in ours.out
    pings = lines_of(ours.out, "ping data: ")
    assert len(pings) == count
    assert lines_of(theirs.out, "server ping data: ") == pings


def test_rping_works_over_ipv6(adapter, pytestconfig):
    address, port = host_of(adapter, version=6), free_port()
    with start_example("rping", "-s", "-a", address, "-p", 0, "--adapter", adapter.info.name) as server:
        chosen = server.wait_for(r"listening on \S+ port (\d+)")[1]
        options = ["-c", "-V", "-a", address, "-p", chosen, "-C", 3]
        with start_program(pytestconfig, "rping", distribution.CONNECTION_PROGRAMS, *options) as client:
            client.succeed()
        assert "3 rounds verified" in server.succeed().out
    if not STRESS:
        return
    with start_program(
        pytestconfig, "rping", distribution.CONNECTION_PROGRAMS, "-s", "-a", address, "-p", port
    ) as server:
        wait_for_rdma_listener(server, port)
        options = ["-c", "-a", address, "-p", port, "-C", 3]
        with start_example("rping", *options, "--adapter", adapter.info.name) as client:
            assert "3 rounds of 64 bytes verified" in client.succeed().out
        server.succeed()


@only_under_stress
def test_persistent_rping_server_serves_several_of_our_clients(adapter, pytestconfig):
    address, port = host_of(adapter), free_port()
    with start_program(
        pytestconfig, "rping", distribution.CONNECTION_PROGRAMS, "-s", "-P", "-a", address, "-p", port
    ) as server:
        wait_for_rdma_listener(server, port)
        options = ["-c", "-v", "-a", address, "-p", port, "--adapter", adapter.info.name, "-C"]
        with start_example("rping", *options, 200) as first:
            # rping keeps the identifier of one request at a time: a second one that comes before its thread has copied
            # it takes its place, and the first client is never answered.
            first.wait_for("ping data: rdma-ping-0")
            with start_example("rping", *options, 20) as second:
                assert "20 rounds of 64 bytes verified" in second.succeed().out
            assert "200 rounds of 64 bytes verified" in first.succeed().out


def test_our_server_ends_cleanly_when_the_rping_client_is_killed(adapter, pytestconfig):
    address = host_of(adapter)
    with start_example("rping", "-s", "-a", address, "-p", 0, "-v", "--adapter", adapter.info.name) as server:
        port = server.wait_for(r"listening on \S+ port (\d+)")[1]
        with start_program(
            pytestconfig, "rping", distribution.CONNECTION_PROGRAMS, "-c", "-a", address, "-p", port
        ) as client:
            server.wait_for("server ping data: rdma-ping-3")
            client.popen.kill()
            result = server.finish()
    # Between two rounds the client's death looks like a disconnect. Within a round it is an error.
    assert result.status in (0, 1)
    assert "Traceback" not in result.err
    assert result.status == 0 or len(result.err.strip().splitlines()) == 1
