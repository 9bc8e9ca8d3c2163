"""The rc_pingpong example against ibverbs-utils' ibv_rc_pingpong, in both roles."""

from __future__ import annotations

import socket

import pytest
from kit.helpers import STRESS, has_kernel_driver, sample
from kit.processes import free_port, start_example, start_program, wait_for_tcp_listener
from kit.quirks import skip_where

import ndpy
from ndpy.platforms.verbs import distribution
from ndpy.vocabulary.quirks import Quirk

PROGRAMS = distribution.VERBS_PROGRAMS
PROGRAM = "ibv_rc_pingpong"

# Options that both programs take: several packets, a larger path MTU, and a single packet.
COMMON = sample([["-s", "10007", "-n", "100"], ["-s", "3000000", "-n", "3", "-m", "4096"], ["-s", "1", "-n", "100"]], 1)


@pytest.fixture
def name(adapter) -> str:
    skip_where(adapter, Quirk.IWARP_MANAGER_ONLY)
    return adapter.info.name


def routable_gids(adapter: ndpy.Adapter) -> list[ndpy.Gid]:
    """The GIDs that both ends on one machine can use, by rank. The first is the one that ndpy chooses by itself."""
    gids = [gid for gid in adapter.info.ports[0].gids if not gid.address.startswith("fe80")]
    return sorted(gids, key=lambda gid: (gid.type != "RoCE v2", gid.index))


@pytest.fixture
def natively(adapter) -> None:
    """For tests of the example, not of the driver. Without NDPY_STRESS=1 they run on soft0 only."""
    if has_kernel_driver(adapter) and not STRESS:
        pytest.skip("with NDPY_STRESS=1 only: an emulated machine starts Python slowly")


@pytest.mark.parametrize("options", COMMON, ids=" ".join)
def test_ibv_rc_pingpong_as_client_of_our_server(adapter, name, pytestconfig, options):
    talk_to_our_server(pytestconfig, adapter, name, ours=options, theirs=options)


@pytest.mark.parametrize("options", COMMON, ids=" ".join)
def test_ibv_rc_pingpong_as_server_of_our_client(adapter, name, pytestconfig, options):
    talk_to_their_server(pytestconfig, adapter, name, ours=options, theirs=options)


def test_ibv_rc_pingpong_with_events_and_validation(adapter, name, pytestconfig):
    common, theirs = ["-s", "20000", "-n", "50"], ["-s", "20000", "-n", "50", "-e", "-c"]
    result = talk_to_their_server(pytestconfig, adapter, name, ours=common, theirs=theirs)
    assert "invalid data" not in result.out
    if STRESS:
        talk_to_our_server(pytestconfig, adapter, name, ours=[*common, "-c"], theirs=theirs)


def test_gid_index_given_by_hand(adapter, name, pytestconfig):
    gids = routable_gids(adapter)
    if len(gids) < 2:
        pytest.skip(f"{name} has only one GID that can be routed")
    options = ["-n", "20", "-g", str(gids[-1].index)]
    talk_to_our_server(pytestconfig, adapter, name, ours=options, theirs=options)
    if STRESS:
        talk_to_their_server(pytestconfig, adapter, name, ours=options, theirs=options)


@pytest.mark.usefixtures("natively")
def test_gid_is_chosen_by_rank_without_an_index(adapter, name):
    with start_example("rc_pingpong", "-d", name, "-p", 0) as server:
        address = server.wait_for(r"local address: .*GID (\S+)")[1]
    assert socket.inet_pton(socket.AF_INET6, address) == routable_gids(adapter)[0].value


@pytest.mark.usefixtures("natively")
def test_a_path_mtu_that_does_not_exist_is_refused(name):
    with start_example("rc_pingpong", "-d", name, "-p", 0, "-m", "1500") as server:
        result = server.finish()
    assert result.status == 2
    assert "1500" in result.err and "4096" in result.err


@pytest.mark.usefixtures("natively")
def test_peer_without_a_gid_is_told_apart(adapter, name, pytestconfig):
    with start_example("rc_pingpong", "-d", name, "-p", 0) as server:
        port = server.wait_for(r"listening on TCP port (\d+)")[1]
        with start_program(pytestconfig, PROGRAM, PROGRAMS, "-d", name, "-p", port, "127.0.0.1") as client:
            result = server.finish()
            assert client.finish().status
    assert result.status == 1
    transport = adapter.info.transport
    assert (
        result.err == f"rc_pingpong: the peer sent no GID, and {transport} cannot do without: start it with -g INDEX\n"
    )


def test_nobody_is_found_without_a_gid(name, pytestconfig):
    port = free_port()
    with start_program(pytestconfig, PROGRAM, PROGRAMS, "-d", name, "-p", port) as server:
        wait_for_tcp_listener(server, port)
        with start_program(pytestconfig, PROGRAM, PROGRAMS, "-d", name, "-p", port, "127.0.0.1") as client:
            assert "RTR" in server.finish().err
            client.finish()


def with_gid(adapter, options):
    return options if "-g" in options else [*options, "-g", str(routable_gids(adapter)[0].index)]


def talk_to_our_server(config, adapter, name, ours, theirs):
    with start_example("rc_pingpong", "-d", name, "-p", 0, *ours) as server:
        port = server.wait_for(r"listening on TCP port (\d+)")[1]
        options = ["-d", name, "-p", port, *with_gid(adapter, theirs)]
        with start_program(config, PROGRAM, PROGRAMS, *options, "127.0.0.1") as client:
            theirs = client.succeed()
        result = server.succeed()
    check_both_know_both(result, theirs)
    return theirs


def talk_to_their_server(config, adapter, name, ours, theirs):
    port = free_port()
    options = ["-d", name, "-p", port, *with_gid(adapter, theirs)]
    with start_program(config, PROGRAM, PROGRAMS, *options) as server:
        wait_for_tcp_listener(server, port)
        with start_example("rc_pingpong", "-d", name, "-p", port, *ours, "127.0.0.1") as client:
            result = client.succeed()
        theirs = server.succeed()
    check_both_know_both(result, theirs)
    return theirs


def check_both_know_both(ours, theirs):
    """Both programs print the same two addresses in the same format, but in opposite order."""

    def addresses(text):
        return [line.split("address:")[1].split() for line in text.splitlines() if "address:" in line]

    assert addresses(ours.out) == addresses(theirs.out)[::-1]
    assert " iters " in theirs.out
    assert "verified" in ours.out
