"""A fault is as the failure that a driver has when it is made to fail: programs/failing.c does both."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.helpers import STRESS, has_kernel_driver, host_of, sample
from kit.processes import foreign_environment
from kit.programs import built
from kit.quirks import has_quirk, skip_where
from test_links import ADDRESS, NETDEV, link, run

import ndpy
from ndpy.faults.injection import Injection
from ndpy.faults.scenario import Fault, Scenario
from ndpy.platforms.verbs import softverbs
from ndpy.vocabulary.quirks import Quirk

__all__ = ["link"]

PROGRAM = Path(__file__).with_name("programs") / "failing.c"
SIZE = 64
# So much the two ends say, with headers, until two messages are there, and the third waits for a receive.
TWO_MESSAGES = 420

Lines = dict[str, list[str]]


def seen(host: str, what: str, *words: str, environment: dict[str, str] | None = None) -> Lines:
    """What each end of failing.c prints, by the kind of line."""
    command = [built(PROGRAM), host, what, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patient(110))
    print(f"$ {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    assert done.returncode == 0, done.stdout + done.stderr
    found: Lines = {}
    for line in done.stdout.splitlines():
        end, kind, rest = line.split(" ", 2)
        found.setdefault(f"{end} {kind}", []).append(rest.strip())
    return found


@dataclass(frozen=True)
class Alike:
    """A failure and its fault.

    Attributes:
        what: the word of failing.c.
        fault: for an executor and the adapter of the real failure.
        kinds: the lines that are the same.
        end: that has the fault.
        because: why other lines differ.
        on_siw: whether siw's own failure is the same.
    """

    what: str
    fault: Callable[[str, ndpy.Adapter], Fault]
    kinds: tuple[str, ...] = ("client cm", "client done", "client event", "server cm", "server done")
    end: str = "client"
    because: str = field(default="", compare=False)
    on_siw: bool = False


def status(operation: str, name: str) -> Callable[[str, ndpy.Adapter], Fault]:
    return lambda executor, adapter: Fault("status", operation=operation, nth=3, status=name)


def of_own_memory(executor: str, adapter: ndpy.Adapter) -> Fault:
    has_other = has_quirk(adapter, Quirk.RXE_ONE_STATUS_FOR_PORT_AND_MEMORY)
    return Fault("status", operation="send", nth=3, status="LOC_QP_OP_ERR" if has_other else "LOC_PROT_ERR")


def of_short_receive(executor: str, adapter: ndpy.Adapter) -> Fault:
    # rxe has this status for all that a responder cannot do (rxe_resp.c, RESPST_ERR_LENGTH).
    name = "LOC_QP_OP_ERR" if adapter.info.driver == "rdma_rxe" else "LOC_LEN_ERR"
    return Fault("status", operation="receive", nth=3, status=name)


def disconnected(executor: str, adapter: ndpy.Adapter) -> Fault:
    return Fault("disconnect", bytes=2 * SIZE + 1)


def killed(executor: str, adapter: ndpy.Adapter) -> Fault:
    # The kernel of a killed program says goodbye for it. soft0 goes with its process.
    return Fault("lose", bytes=TWO_MESSAGES) if executor == "engine" else disconnected(executor, adapter)


CLIENT = ("client cm", "client done", "client event")
ALIKE = [
    Alike("wrong_key", status("write", "REM_ACCESS_ERR")),
    Alike("nobody", lambda executor, adapter: Fault("refuse"), ("client cm",)),
    Alike("no_receive", status("send", "RNR_RETRY_EXC_ERR")),
    Alike("own_key", of_own_memory),
    Alike("no_queue_pair", status("send", "RETRY_EXC_ERR"), CLIENT, because="the server's queue pair is there"),
    Alike(
        "to_error",
        lambda executor, adapter: Fault("queue_pair_fatal", nth=3),
        ("client cm", "client done", "server cm", "server done"),
        because="a program that moves the queue pair itself gets no event",
    ),
    Alike("disconnect", disconnected, CLIENT),
    Alike("killed", killed, CLIENT),
    Alike("overrun", lambda executor, adapter: Fault("completion_queue_error", nth=3), ("client event",), on_siw=True),
    Alike("reject", lambda executor, adapter: Fault("reject", data=b"no!"), ("client cm",)),
    Alike(
        "short_receive",
        of_short_receive,
        ("server done", "server cm"),
        "server",
        "with the shim the send of a message whose receive fails succeeds",
        on_siw=True,
    ),
]
PORT_DOWN = Alike("command", lambda executor, adapter: Fault("port_down", nth=3), ("client event", "client call"))
REMOVE = Alike(
    "remove",
    lambda executor, adapter: Fault("remove", nth=3),
    ("client cm",),
    because="a real device stays until its users have closed everything",
)
TIME_OUT = Alike("time_out", lambda executor, adapter: Fault("time_out"), ("client cm",))
# On the network of the link, whose other end is a veth without an address.
SILENT = "203.0.113.2"


def with_fault(executor: str, host: str, alike: Alike, adapter: ndpy.Adapter) -> Lines:
    """The same conversation on the adapter by the shim, or on soft0 by its engine."""
    with Injection(Scenario([alike.fault(executor, adapter)]), executor) as injection:
        if executor == "engine":
            environment = injection.environment(softverbs.environment(softverbs.folder(), os.environ))
            host = "127.0.0.1"
        else:
            environment = injection.environment(foreign_environment())
        found = seen(host, alike.what, alike.end, environment=environment)
        injection.report().check()
    return found


def check(alike: Alike, fault: Lines, real: Lines, ignored: str = "") -> None:
    def compared(seen: Lines) -> Lines:
        return {kind: [line for line in seen.get(kind, []) if line != ignored] for kind in alike.kinds}

    assert compared(fault) == compared(real)


@pytest.mark.parametrize("alike", sample(ALIKE, 2), ids=lambda alike: alike.what)
def test_a_fault_is_as_the_real_failure(adapter, alike):
    if has_quirk(adapter, Quirk.IWARP_MANAGER_ONLY) and not alike.on_siw:
        pytest.skip("siw fails in another way, see docs/faults.md")
    if alike.what == "no_queue_pair" and adapter.info.driver != "rdma_rxe":
        pytest.skip("soft0 has a stream: when the peer's queue pair goes, it ends, and nothing is tried again")
    real = seen(host_of(adapter), alike.what, environment=foreign_environment())
    if alike.what == "overrun":
        # The drivers of Linux tell of each completion that is lost.
        real["client event"] = real["client event"][:1]
    for executor in executors(adapter, alike):
        check(alike, with_fault(executor, host_of(adapter), alike, adapter), real)


def executors(adapter: ndpy.Adapter, alike: Alike) -> list[str]:
    if alike.what == "killed":
        # In software, the peer's host is its process.
        return ["shim"] if has_kernel_driver(adapter) else ["engine"]
    return ["engine", "shim"]


def check_on_a_link(alike: Alike, adapter: ndpy.Adapter, command: str) -> Lines:
    real = seen(ADDRESS, alike.what, "-", command, environment=foreign_environment())
    # siw ends the connections of a device before it goes, and soft0 does not.
    is_early = alike is REMOVE and has_quirk(adapter, Quirk.IWARP_MANAGER_ONLY)
    for executor in ("engine", "shim"):
        fault = with_fault(executor, host_of(adapter), alike, adapter)
        check(alike, fault, real, ignored="RDMA_CM_EVENT_DISCONNECTED 0" if is_early else "")
    return real


on_a_link = pytest.mark.skipif(not STRESS, reason="with NDPY_STRESS=1 only: it adds and removes network devices")


@on_a_link
def test_a_port_that_is_down_has_the_same_event_as_a_real_one(adapter, link):
    check_on_a_link(PORT_DOWN, adapter, f"ip link set {link[1]} down")


@on_a_link
def test_a_removed_device_is_told_to_a_connection_as_a_real_one(adapter, link):
    real = check_on_a_link(REMOVE, adapter, f"rdma link delete {link[0]} &")
    assert real["client cm"][-1] == "RDMA_CM_EVENT_DEVICE_REMOVAL 0"
    assert link[0] not in [info.name for info in ndpy.list_adapters()]


@on_a_link
def test_a_silent_host_is_unreachable_as_a_real_one(adapter, link):
    skip_where(adapter, Quirk.SIW_CONNECT_BLOCKS)
    run("ip", "neighbour", "add", SILENT, "lladdr", "02:00:00:00:00:02", "dev", NETDEV)
    real = check_on_a_link(TIME_OUT, adapter, SILENT)
    assert real["client cm"][-1] == f"RDMA_CM_EVENT_UNREACHABLE {-errno.ETIMEDOUT}"
