"""What other users of the machine and other hosts can do with soft0. Each test is a sentence of
softrdma/verbs/README.md.

stranger.py is the neighbour: another user, or a process in a network namespace, which is another host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import ipaddress
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hostile import READY_BY_READ
from kit.compiling import compiled
from kit.deadlines import patient
from kit.helpers import (
    DEADLINE_S,
    STRESS,
    Keeper,
    Offer,
    assert_quiet,
    connect_pair,
    contents,
    create_end,
    establish,
    memory,
    succeed,
    take,
    wait_until,
)
from stranger import greeting
from strangers import Stranger, Strangers, once

import ndpy
from ndpy import AddressVector, Endpoint, QueuePairState

NOBODY, SOMEBODY = 65534, 65533
HERE = "127.0.0.1"
# TEST-NET-2, for this machine and another one.
OURS, THEIRS = "198.51.100.1", "198.51.100.2"
NAMESPACE = f"ndpy-{os.getpid()}"
# Smaller than any number of soft0, so that the peer is the end that connects.
PEER = 1 << 8 | 7
OUR_PSN, PEER_PSN = 0x123456, 0x654321
NO_PSN = 0xFFFFFFFF  # softrdma/verbs/greeting.h
GUESTS = 128  # softrdma/engine/guests.c
BACKLOG = 8

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def needs_root():
    if os.geteuid():
        pytest.skip("this needs root, to become another user (CAP_SETUID)")


@pytest.fixture
def other_host():
    """A network namespace with a link to this one. The adapter is opened anew, so that it has the link's address."""
    if shutil.which("ip") is None:
        pytest.skip("this needs ip, of iproute2")

    def ip(command: str, *, must: bool = True) -> None:
        done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, timeout=patient(30))
        if must and done.returncode:
            pytest.skip(f"this needs network namespaces (CAP_NET_ADMIN, CAP_SYS_ADMIN): ip {command}: {done.stderr}")

    link = f"nd{os.getpid()}"
    try:
        ip(f"netns add {NAMESPACE}")
        ip(f"link add {link} type veth peer name {link}p netns {NAMESPACE}")
        ip(f"address add {OURS}/30 dev {link}")
        ip(f"link set {link} up")
        ip(f"-n {NAMESPACE} address add {THEIRS}/30 dev {link}p")
        ip(f"-n {NAMESPACE} link set {link}p up")
        ip(f"-n {NAMESPACE} link set lo up")
        yield {"namespace": NAMESPACE}
    finally:
        ip(f"link delete {link}", must=False)
        ip(f"netns delete {NAMESPACE}", must=False)


@pytest.fixture(scope="module", autouse=True)
def strangers():
    Stranger.all = Strangers()
    yield
    Stranger.all.close()


@contextlib.contextmanager
def opened() -> Iterator[ndpy.Adapter]:
    with ndpy.open_adapter("soft0") as adapter:
        yield adapter


def mapped(address: str) -> bytes:
    return bytes(10) + b"\xff\xff" + ipaddress.IPv4Address(address).packed


class Expecting:
    """A queue pair that is connected by number, and expects its peer's connection. One receive is posted."""

    def __init__(
        self,
        keep: Keeper,
        adapter: ndpy.Adapter,
        *,
        ours: str = HERE,
        theirs: str = HERE,
        peer: int = PEER,
        psn: int = OUR_PSN,
        peer_psn: int = PEER_PSN,
    ) -> None:
        self.end = create_end(keep, adapter)
        self.address = ours
        self.inbox = memory(keep, adapter, 64)
        gid = next(gid for gid in adapter.info.ports[0].gids if gid.address == ours)
        local = self.end.queue_pair.local_endpoint(gid.index, psn)
        self.number = local.qp_number
        self.port = local.qp_number >> 8
        self.right = {"to": self.number, "sender": peer, "to_psn": psn, "from_psn": peer_psn}
        self.end.queue_pair.connect_endpoint(Endpoint(0, peer, peer_psn, mapped(theirs), mtu=local.mtu))
        self.end.queue_pair.receive(self.inbox, context=5)

    def greeting(self, **changes: int) -> str:
        return greeting(**{**self.right, **changes}).hex()

    def target(self, **changes: int) -> dict[str, Any]:
        return {"address": self.address, "port": self.port, "private": self.greeting(**changes)}

    def takes(self, message: str) -> bool:
        (completion,) = succeed(self.end.cq)
        return completion.context == 5 and contents(self.inbox).startswith(message.encode())


def held(port: int) -> int:
    """How many connections to a port this process has descriptors of. Those of earlier tests may still close."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listens = "0A"
    return sum(
        int(words[1].partition(":")[2], 16) == port and words[3] != listens and f"socket:[{words[9]}]" in inodes
        for words in lines
    )


def answer_to(victim: Expecting, *, who: dict[str, Any] | None = None, **changes: int) -> str:
    """How the victim answers one greeting, in the end as root: only what it says can be wrong then."""
    return str(once("request", **victim.target(**changes), **(who or {}))["answer"])


@pytest.fixture
def victim(keep, adapter):
    return Expecting(keep, adapter)


def assert_peer_gets_in(victim: Expecting, **who: Any) -> None:
    with Stranger("request", **victim.target(), **who) as peer:
        assert peer.found() == {"answer": "accepted"}
        peer.tell("the right one")
        assert victim.takes("the right one")


# ---- By number ----


def test_another_user_of_the_machine_is_refused_whatever_it_knows(victim):
    assert answer_to(victim, who={"uid": NOBODY}) == "rejected"
    assert_peer_gets_in(victim)


def test_another_user_is_refused_by_way_of_an_ipv6_socket_too(victim):
    victim.address = f"::ffff:{HERE}"
    assert answer_to(victim, who={"uid": NOBODY}) == "rejected"


def test_another_user_that_leaves_at_once_is_refused_too(victim):
    """A socket that nobody has any more has no owner, which looks like root's."""
    once("hasty", **victim.target(), rounds=50, uid=NOBODY)
    assert_quiet(victim.end.cq, 0.5)
    assert_peer_gets_in(victim)


def test_a_user_lets_itself_and_root_in_and_no_other_user(keep, adapter):
    answers = []
    with contextlib.ExitStack() as ends:
        for uid in (SOMEBODY, 0, NOBODY):
            target = Expecting(keep, adapter).target()
            answers.append(ends.enter_context(Stranger("request", **target, uid=uid, told=True)))
        os.seteuid(SOMEBODY)  # of all threads, so the library's too
        try:
            for peer in answers:
                peer.tell()
            assert [peer.found()["answer"] for peer in answers] == ["accepted", "accepted", "rejected"]
        finally:
            os.seteuid(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sender": PEER + 1},
        {"to_psn": OUR_PSN + 1},
        {"to_psn": 0},
        {"from_psn": PEER_PSN - 1},
        {"from_psn": 0},
        {"from_psn": 0xFFFFFFFF, "to_psn": 0},
        {"version": 1},
        {"version": 3},
    ],
    ids=str,
)
def test_a_peer_names_its_number_and_both_psns(victim, changes):
    assert answer_to(victim, **changes) == "rejected"
    assert_peer_gets_in(victim)


def test_a_peer_that_is_not_in_rts_proves_itself_by_one_psn(victim):
    assert answer_to(victim, from_psn=0xFFFFFFFF) == "accepted"


def test_a_peer_has_the_address_of_its_gid(victim):
    assert answer_to(victim, who={"source": "127.0.0.2"}) == "rejected"
    assert_peer_gets_in(victim)


def test_a_peer_is_not_that_of_another_queue_pair_of_the_process(keep, adapter, victim):
    other = Expecting(keep, adapter, peer=PEER + 1)
    assert other.port == victim.port
    assert answer_to(victim, to=other.number) == "rejected"
    # A number that nobody has.
    assert answer_to(victim, to=other.port << 8 | 255) == "rejected"
    for expecting in (victim, other):
        assert_peer_gets_in(expecting)


def test_an_established_connection_stays_whoever_greets_again(victim):
    with Stranger("request", **victim.target()) as peer:
        assert peer.found() == {"answer": "accepted"}
        for again in ({}, {}, {"uid": NOBODY}):
            assert answer_to(victim, who=again) == "rejected"
        peer.tell("still here")
        assert victim.takes("still here")


def test_a_peer_that_gave_up_an_attempt_may_come_again(victim):
    for _ in range(3):
        with socket.create_connection((HERE, victim.port), DEADLINE_S) as half:
            half.sendall(dataclasses.replace(READY_BY_READ, private_data=bytes.fromhex(victim.greeting())).encode())
            assert half.recv(100)
    assert_peer_gets_in(victim)


def connect_by_modify(end: Any, remote_number: int) -> None:
    """Into RTR, so that the end looks for a peer on this machine."""
    local = end.queue_pair.local_endpoint()
    gid = next(gid for gid in end.adapter.info.ports[0].gids if gid.address == HERE)
    end.queue_pair.modify(
        state=QueuePairState.RTR,
        path=AddressVector(gid=gid.value, gid_index=gid.index, lid=0, port=1),
        path_mtu=min(local.mtu, 1024),
        remote_number=remote_number,
        receive_psn=PEER_PSN,
        inbound_read_limit=2,
        min_rnr_timer=12,
    )


def test_a_peer_that_comes_early_waits_and_a_stranger_does_not_keep_it_out(keep, adapter):
    """Four connections wait for each queue pair whose program has not named its peer. The peer comes again."""
    ends = create_end(keep, adapter), create_end(keep, adapter)
    early, late = sorted(ends, key=lambda end: end.queue_pair.number)
    number = late.queue_pair.number
    holds = Expecting(keep, adapter)  # without one such queue pair, nobody listens
    target = {"address": HERE, "port": holds.port, "private": greeting(number, PEER, 1, 2).hex()}
    with Stranger("crowd", **target, count=20) as crowd:
        crowd.found()
        gid = next(gid for gid in adapter.info.ports[0].gids if gid.address == HERE)
        first, second = (end.queue_pair.local_endpoint(gid.index) for end in (early, late))
        wait_until(lambda: held(holds.port) == 4, "all but four greetings were refused, and have closed")
        early.queue_pair.connect_endpoint(second)
        late.queue_pair.connect_endpoint(first)
        inbox = memory(keep, adapter, 16)
        late.queue_pair.receive(inbox)
        early.queue_pair.send(memory(keep, adapter, b"it is me"))
        succeed(early.cq)
        succeed(late.cq)
        assert contents(inbox).startswith(b"it is me")


@pytest.mark.parametrize("end", ["queue pair", "time"])
def test_a_peer_that_nobody_names_is_let_go(keep, adapter, end):
    """When its time is over, or when the queue pair has gone that it is for."""
    if end == "time" and not STRESS:
        pytest.skip("takes 10 s: with NDPY_STRESS=1 only")
    mine = Keeper()
    unnamed, holds = create_end(mine, adapter), Expecting(keep, adapter)
    target = {"address": HERE, "port": holds.port, "private": greeting(unnamed.queue_pair.number, PEER, 1, 2).hex()}
    with Stranger("crowd", **target, count=1) as early:
        early.found()
        wait_until(lambda: held(holds.port) == 1, "it has been taken")
        if end == "queue pair":
            mine.close()
        wait_until(lambda: held(holds.port) == 0, "it is let go")
    mine.close()


def test_no_other_user_gets_the_port_of_a_number(keep, adapter, victim):
    for address in ("0.0.0.0", HERE, "127.0.0.2", "::", "::1"):
        assert once("listen", address=address, port=victim.port, uid=NOBODY) == {
            "listens": False,
            "errno": errno.EADDRINUSE,
        }


EXPECTS = """
import sys
sys.path[:0] = sys.argv[1:]
import ndpy, test_strangers
from kit.helpers import Keeper
keep = Keeper()
with ndpy.open_adapter("soft0") as adapter:
    test_strangers.Expecting(keep, adapter)
    keep.close()
"""


def test_no_other_user_gets_the_port_of_a_number_while_it_begins_to_be_listened_to(tmp_path):
    attacks = tmp_path / "attacks"
    source = Path(__file__).with_name("programs") / "attacked_listen.c"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Werror", "-shared", "-fPIC"]
    library = compiled(tmp_path / "attacked.so", *flags, source, "-ldl")
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", EXPECTS, tests, tests / "soft", tests / "softnd"],
        env={**os.environ, "LD_PRELOAD": str(library), "NDPY_TEST_ATTACKS": str(attacks)},
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 0, done
    tried = attacks.read_text().splitlines()
    assert len(tried) == 9
    assert not [line for line in tried if not line.endswith(" refused")]


def test_a_process_that_changes_its_user_can_still_listen(keep, adapter):
    create_end(keep, adapter)  # reserves a port, as root
    os.seteuid(SOMEBODY)
    try:
        victim = Expecting(keep, adapter)
    finally:
        os.seteuid(0)
    assert_peer_gets_in(victim)


def reachable(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), DEADLINE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def test_a_number_is_listened_to_only_while_a_peer_is_expected_and_only_at_its_gid(keep, adapter):
    idle = create_end(keep, adapter)
    port = idle.queue_pair.number >> 8
    addresses = [HERE, "127.0.0.2", "::1", *adapter.info.addresses]
    assert not any(reachable(address, port) for address in addresses)
    for _ in range(3):
        mine = Keeper()
        expecting = Expecting(mine, adapter)
        assert expecting.port == port
        assert {address for address in addresses if reachable(address, port)} == {HERE}
        mine.close()
        assert not any(reachable(address, port) for address in addresses)
    # The end with the smaller number connects, so it needs no listener.
    connect_by_modify(idle, 0xFFFF00)
    assert not any(reachable(address, port) for address in addresses)


@pytest.mark.parametrize("asked", ["in RTS", "in RTR"])
@pytest.mark.parametrize("uid", [NOBODY, 0])
def test_another_user_on_the_port_of_a_peer_that_has_gone_gets_nothing(keep, adapter, uid, asked):
    """What root gets shows what it would be: nothing is encrypted.

    A queue pair does not tell its PSN before it is in RTS, and asks again then, if it is not connected yet.
    """
    end = create_end(keep, adapter)
    number = end.queue_pair.number
    with Stranger("impostor", above=number >> 8, uid=uid) as impostor:
        peer = impostor.found()["port"] << 8
        early, complete = (greeting(peer, number, PEER_PSN, psn) for psn in (NO_PSN, OUR_PSN))
        connect_by_modify(end, peer)
        asking = []
        if asked == "in RTR":
            asking.append(bytes.fromhex(impostor.found()["asked"]))
            assert asking == [early]
        end.queue_pair.modify(
            state=QueuePairState.RTS,
            send_psn=OUR_PSN,
            outbound_read_limit=2,
            ack_timeout=14,
            retry_count=7,
            rnr_retry_count=7,
        )
        end.queue_pair.send(memory(keep, adapter, b"a secret"), context=9)
        messages = []
        while not messages and (uid == 0 or complete not in asking):
            found = impostor.found()
            if "asked" in found:
                asking.append(bytes.fromhex(found["asked"]))
            else:
                messages += found["messages"]
        assert set(asking) <= {early, complete}
        if uid == 0:
            assert [bytes.fromhex(message) for message in messages] == [b"a secret"]
        else:
            assert messages == impostor.found()["messages"] == []
            (failed,) = take(end.cq)
            assert failed.context == 9
            assert not failed.ok


# ---- Other hosts ----


def test_another_host_needs_the_address_the_numbers_and_the_psns(keep, other_host):
    with opened() as adapter:
        mine = Keeper()
        here = Expecting(mine, adapter)
        victim = Expecting(mine, adapter, ours=OURS, theirs=THEIRS)
        assert answer_to(victim, who=other_host, to_psn=0) == "rejected"
        assert answer_to(victim, who=other_host, from_psn=PEER_PSN ^ 1) == "rejected"
        assert answer_to(victim, who=other_host, to=here.number) == "rejected"
        assert answer_to(victim) == "rejected"  # from this machine
        assert_peer_gets_in(victim, **other_host)
        mine.close()


def test_a_program_that_leaves_its_psn_0_is_open_to_other_hosts(keep, other_host):
    """The host has the peer's address, and need not know more than the numbers. Those can be tried."""
    with opened() as adapter:
        mine = Keeper()
        victim = Expecting(mine, adapter, ours=OURS, theirs=THEIRS, psn=0, peer_psn=0)
        tried = [PEER - 3, PEER - 2, PEER - 1, PEER]
        assert [answer_to(victim, who=other_host, sender=number) for number in tried] == 3 * ["rejected"] + ["accepted"]
        mine.close()


def test_what_has_loopback_addresses_only_is_not_reached_from_other_hosts(keep, other_host):
    with opened() as adapter:
        mine = Keeper()
        victim = Expecting(mine, adapter)
        listener = mine(adapter.listen((HERE, 0)))
        for port in (victim.port, listener.address[1]):
            found = once("request", address=OURS, port=port, private=victim.greeting(), **other_host)
            assert found["answer"] == "unreachable"
        mine.close()


# ---- By the connection manager ----


@pytest.mark.parametrize("neighbour", ["user", "host"])
def test_everybody_who_reaches_a_listener_may_ask_and_the_program_decides(request, neighbour):
    who = {"uid": NOBODY} if neighbour == "user" else request.getfixturevalue("other_host")
    address = HERE if neighbour == "user" else OURS
    with opened() as adapter:
        mine = Keeper()
        listener = mine(adapter.listen(("0.0.0.0", 0)))
        target = {"address": address, "port": listener.address[1], "private": b"who I am".hex()}
        with Stranger("request", **target, **who) as stranger:
            asking = mine(listener.get_request(DEADLINE_S))
            assert bytes(asking.private_data) == b"who I am"
            assert asking.peer_address[0] == (HERE if neighbour == "user" else THEIRS)
            asking.reject()
            assert stranger.found() == {"answer": "rejected"}
        with Stranger("request", **target, **who) as stranger:
            end = create_end(mine, adapter)
            inbox = memory(mine, adapter, 32)
            end.queue_pair.receive(inbox)
            asking = mine(listener.get_request(DEADLINE_S))
            asking.accept(end.queue_pair, timeout_s=DEADLINE_S)
            assert stranger.found() == {"answer": "accepted"}
            stranger.tell("in the open")
            succeed(end.cq)
            assert contents(inbox).startswith(b"in the open")
        mine.close()


def test_who_is_not_accepted_reaches_no_queue_pair(keep, adapter):
    listener = keep(adapter.listen((HERE, 0)))
    pair = connect_pair(keep, adapter)
    inbox = memory(keep, adapter, 64)
    pair.server.queue_pair.receive(inbox)
    once("hasty", address=HERE, port=listener.address[1], private="", uid=NOBODY)
    request = keep(listener.get_request(DEADLINE_S))
    assert_quiet(pair.server.cq, 0.3)
    with contextlib.suppress(ndpy.ConnectionAbortedError):
        request.reject()
    assert_quiet(pair.server.cq, 0.3)


def honest_client(keep: Keeper, adapter: ndpy.Adapter, listener: ndpy.Listener) -> None:
    client, server = create_end(keep, adapter), create_end(keep, adapter)
    connector = keep(adapter.create_connector())
    connecting = connector.begin_connect(client.queue_pair, listener.address)
    accepted = keep(listener.get_request(DEADLINE_S))
    establish(Offer(listener, connecting, connector, accepted), server.queue_pair)


def test_silent_connections_leave_room_for_an_honest_client(keep, adapter):
    listener = keep(adapter.listen((HERE, 0)))
    with Stranger("crowd", address=HERE, port=listener.address[1], count=600, uid=NOBODY) as crowd:
        assert crowd.found() == {"opened": 600}
        wait_until(lambda: held(listener.address[1]) <= GUESTS, "the number of silent connections is limited")
        honest_client(keep, adapter, listener)
        crowd.tell()
        assert 0 < crowd.found()["open"] <= GUESTS


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no further ones."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in taken:
            os.close(descriptor)


def test_silent_connections_give_their_descriptors_to_an_honest_client(keep, adapter):
    listener = keep(adapter.listen((HERE, 0)))
    target = {"address": HERE, "port": listener.address[1]}
    with (
        Stranger("crowd", **target, count=60, uid=NOBODY) as crowd,
        Stranger("request", **target, private="", uid=NOBODY, told=True) as honest,
    ):
        assert crowd.found() == {"opened": 60}
        wait_until(lambda: held(listener.address[1]) == 60, "the listener has taken all of them")
        with no_descriptors():
            honest.tell()
            keep(listener.get_request(DEADLINE_S)).reject()
            assert honest.found() == {"answer": "rejected"}
        # It did not wait for their time to be over.
        crowd.tell()
        assert crowd.found()["open"] >= 50


@pytest.mark.filterwarnings("ignore:Listener at:RuntimeWarning")
def test_requests_beyond_the_backlog_are_refused(keep, adapter):
    listener = keep(adapter.listen((HERE, 0), backlog=BACKLOG))
    target = {"address": HERE, "port": listener.address[1], "private": b"me".hex()}
    with Stranger("crowd", **target, count=100, uid=NOBODY) as crowd:
        assert crowd.found() == {"opened": 100}
        wait_until(lambda: listener.refused >= 100 - BACKLOG, "all but the backlog are refused")
        wait_until(lambda: held(listener.address[1]) == BACKLOG, "and closed")
        for _ in range(BACKLOG):
            keep(listener.get_request(DEADLINE_S)).reject()
        honest_client(keep, adapter, listener)


PRIVILEGED = """
import os, sys
import ndpy
uid, port = map(int, sys.argv[1:])
with ndpy.open_adapter("soft0") as adapter:
    os.setuid(uid)
    try:
        adapter.listen(("127.0.0.1", port))
    except ndpy.NdpyError as error:
        print(type(error).__name__, error.native, error)
"""


def test_a_port_that_needs_a_privilege_says_so():
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first == 0:
        pytest.skip("every port is free for all here: net.ipv4.ip_unprivileged_port_start is 0")
    done = subprocess.run(
        [sys.executable, "-c", PRIVILEGED, str(NOBODY), str(first - 1)],
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert re.search(rf"^PermissionError {errno.EACCES} .*privilege", done.stdout), done
