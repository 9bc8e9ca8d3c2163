"""Linux's siw in a VM, with softnd under Wine and soft0 on this machine, through QEMU's user network.

rping's conversation and ndpy's examples run between them, and all data are verified. One VM serves all tests. The
guest runs, in this order: rping's servers; rping as client of a server here for each size; a client that violates
an access right; the examples as clients of servers here; early_disconnect_siw.py. The VM is slow to start, so the
servers here start before it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

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
from hostile import ROOT, Program, WindowsProcess
from kit.processes import free_ports

from ndpy.tools.machines import tools

SIZES = [64, 23, 10007, 65535]
ROUNDS = 30
VM_LIMIT_S = share(1200, 600)
CRC_SIZE = 10007
# The end here and what it says. Each conversation has its own server.
RPINGS = [*(("softnd", size) for size in SIZES), *(("soft0", size) for size in share(SIZES, [10007]))]
TALKS = [("softnd", name) for name in EXAMPLES] + [("soft0", name) for name in share(list(EXAMPLES), ["file"])]
GUEST_PORTS: dict[object, int] = {name: 7174 + at for at, name in enumerate([*RPINGS, "crc", "access_violation"])}
EXAMPLE_PORTS: dict[object, int] = {name: 7274 + at for at, name in enumerate(TALKS)}
DISCONNECTS = ROOT / "tests/softnd/early_disconnect_siw.py"
DISCONNECTS_PORT = 7374
DISCONNECTS_COUNT = share(50, 3)  # of each of 23 conversations

pytestmark = [pytest.mark.vm, pytest.mark.timeout(VM_LIMIT_S + 120)]

# The kernel listens for siw, so only the connection manager's table shows when it is ready. Each client has its own
# server: rping's option for several clients sometimes leaves one of them without an answer.
_GUEST = """
for port in {servers}; do rping -s -a 10.0.2.15 -p $port -S 65535 & done
{example_servers}
until [ $(rdma resource show cm_id | grep LISTEN | grep -c 'src-addr 10.0.2.15:') = {count} ]; do sleep 0.2; done
echo rping servers are there
{clients}
echo begin: access_violation
{python} -B {access_violation} {access_violation_port}
echo end: access_violation $?
{example_clients}
{python} -B {disconnects} serve 10.0.2.15 {disconnects_port} 10.0.2.2 {own_disconnects_port} {disconnects_count} 2>&1 &
until [ -e {done} ]; do sleep 0.5; done
echo leaving
"""

_CLIENT = """
echo begin: client {end} {size}
rping -c -V -a 10.0.2.2 -p {port} -S {size} -C {rounds} 2>&1
echo end: client {end} {size} $?
"""

_EXAMPLE_SERVER = "{command} >/tmp/{log} 2>&1 &\n"

_EXAMPLE_CLIENT = """
echo begin: example {end} {name}
{command} 2>&1
echo end: example {end} {name} $?
"""


def in_vm(example: tuple[Path, list[str]], port: int, template: str, end: str, name: str) -> str:
    """Return the lines of the guest's script that run an example for the end here."""
    program, arguments = example
    words = [sys.executable, "-B", program, *arguments, "--port", port, "--adapter", "10.0.2.15"]
    log = f"example-{end}-{name.replace(' ', '-')}"
    return template.format(command=shlex.join(map(str, words)), end=end, name=name, log=log)


def rping_server(end: str, port: int, **environment: str) -> Program:
    """Start rping's server here and wait until it listens."""
    if end == "soft0":
        program = rping_on_soft0("-s", "-a", "127.0.0.1", "-p", port, "-S", 65535)
        wait_until_listening(program, port)
        return program
    arguments = (hostile.dll(), "server", "127.0.0.1", port, 65535, 0)
    process = WindowsProcess(hostile.PROGRAMS / "rping.exe", *arguments, limit_s=VM_LIMIT_S + 60, **environment)
    assert process.next_line().startswith("listening")
    return process


def example_here(end: str, example: tuple[Path, list[str]], port: int, limit_s: float) -> Program:
    return example_on_soft0(example, port) if end == "soft0" else example_on_softnd(example, port, limit_s)


class Siw:
    """The VM, and the servers here for it."""

    def __init__(self, machine: Program, ports: dict[object, int], servers: dict[object, Program], trace: Path) -> None:
        self.machine = machine
        self.ports = ports  # ports of this machine that lead to the servers in the VM
        self.servers = servers
        self.trace = trace

    def wait_for(self, beginning: str) -> str:
        """Return the first line of the VM that begins with the text."""
        return self.machine.wait_for(beginning, VM_LIMIT_S)

    def softnd_client(self, name: object, role: str, size: int, **environment: str) -> list[str]:
        """Run softnd's client against rping's server in the VM; return its output."""
        self.wait_for("rping servers are there")
        arguments = (hostile.dll(), role, "127.0.0.1", self.ports[name], size, ROUNDS)
        with WindowsProcess(hostile.PROGRAMS / "rping.exe", *arguments, limit_s=120, **environment) as process:
            status = process.finish(60)
        assert status == 0, (process.lines, self.machine.lines[-20:])
        return process.lines


@pytest.fixture(scope="module")
def siw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siw]:
    absent = tools.missing(tools.FOR_VM)
    if absent:
        pytest.skip(tools.explain_missing(absent))
    if not any(Path("/lib/modules").glob("*/**/siw.ko*")):
        pytest.skip("no kernel here has siw: make setup")
    hostile.windows_program("rping")
    folder = tmp_path_factory.mktemp("siw")
    done = ROOT / "softrdma/build" / f"siw-{os.getpid()}.done"  # the VM sees it; the VM has its own /tmp
    script = ROOT / "softrdma/build" / f"siw-{os.getpid()}.sh"
    guest_ports = {**GUEST_PORTS, **EXAMPLE_PORTS}
    own = [*RPINGS, ("crc", CRC_SIZE), "access_violation", *TALKS]
    disconnects_port, own_disconnects_port, *ports = free_ports(2 + len(guest_ports) + len(own))
    forwarded = dict(zip(guest_ports, ports, strict=False))
    own_ports: dict[object, int] = dict(zip(own, ports[len(guest_ports) :], strict=True))
    script.write_text(
        _GUEST.format(
            servers=" ".join(map(str, GUEST_PORTS.values())),
            count=len(guest_ports),
            example_servers="".join(
                in_vm(server_of(name), EXAMPLE_PORTS[end, name], _EXAMPLE_SERVER, end, name) for end, name in TALKS
            ),
            example_clients="".join(
                in_vm(client_of(name, "10.0.2.2"), own_ports[end, name], _EXAMPLE_CLIENT, end, name)
                for end, name in TALKS
            ),
            clients="".join(
                _CLIENT.format(end=end, size=size, port=own_ports[end, size], rounds=ROUNDS)
                for end, size in [*RPINGS, ("crc", CRC_SIZE)]
            ),
            python=sys.executable,
            access_violation=ROOT / "tests/softnd/invalid_token_siw.py",
            access_violation_port=own_ports["access_violation"],
            disconnects=DISCONNECTS,
            disconnects_port=DISCONNECTS_PORT,
            own_disconnects_port=own_disconnects_port,
            disconnects_count=DISCONNECTS_COUNT,
            done=done,
        )
    )
    trace = folder / "trace"
    with contextlib.ExitStack() as stack:
        stack.callback(script.unlink, missing_ok=True)
        stack.callback(done.unlink, missing_ok=True)
        servers: dict[object, Program] = {}
        for end, size in RPINGS:
            servers[end, size] = stack.enter_context(rping_server(end, own_ports[end, size]))
        servers["crc", CRC_SIZE] = stack.enter_context(
            rping_server("softnd", own_ports["crc", CRC_SIZE], SOFTND_CRC="required")
        )
        servers["access_violation"] = stack.enter_context(
            rping_server("softnd", own_ports["access_violation"], SOFTND_TRACE=str(trace))
        )
        for end, name in TALKS:
            server = example_here(end, server_of(name), own_ports[end, name], VM_LIMIT_S + 60)
            servers[end, name] = stack.enter_context(server)
            assert "listening" in server.next_line()
        command = [sys.executable, "-m", "ndpy", "vm", "run"]
        command += [f"--forward={port}:{guest_ports[name]}" for name, port in forwarded.items()]
        command.append(f"--forward={disconnects_port}:{DISCONNECTS_PORT}")
        command += ["--adapter", "siw", "--limit", str(VM_LIMIT_S), "--", "sh", str(script)]
        machine = stack.enter_context(Program(command, dict(os.environ)))
        yield Siw(
            machine,
            {**forwarded, "disconnects": disconnects_port, "own disconnects": own_disconnects_port},
            servers,
            trace,
        )
        done.touch()
        status = machine.process.wait(60)
    assert status == 0, "\n".join(machine.lines[-20:])  # 123: the VM's kernel log shows an error


@pytest.mark.parametrize("size", SIZES)
def test_softnd_client_verifies_what_rping_server_on_siw_writes(siw, size):
    assert siw.softnd_client(("softnd", size), "client", size) == [f"client: {ROUNDS} rounds of {size} bytes verified"]


def test_softnd_client_and_siw_use_crcs_if_they_are_asked_for(siw):
    """The size is small because of a defect of siw. It may answer softnd's Read of no bytes with the memory into which
    it is reading itself. If these are more than 32 bytes, they change after it has computed their CRC.
    """
    lines = siw.softnd_client("crc", "client", 23, SOFTND_CRC="required")
    assert lines == [f"client: {ROUNDS} rounds of 23 bytes verified"]


def test_siw_and_softnd_server_use_crcs_if_they_are_asked_for(siw):
    ended = f"end: client crc {CRC_SIZE} "
    assert siw.wait_for(ended) == f"{ended}0"
    server = siw.servers["crc", CRC_SIZE]
    assert server.finish() == 0, server.lines
    assert server.lines[1:] == [f"server: {ROUNDS} rounds verified"]


@pytest.mark.parametrize("size", [size for end, size in RPINGS if end == "soft0"])
def test_rping_client_on_soft0_verifies_what_rping_server_on_siw_writes(siw, size):
    siw.wait_for("rping servers are there")
    arguments = ("-c", "-V", "-a", "127.0.0.1", "-p", siw.ports["soft0", size], "-S", size, "-C", ROUNDS)
    with rping_on_soft0(*arguments) as client:
        assert client.finish() == 0, (client.lines, siw.machine.lines[-20:])


@pytest.mark.parametrize(("end", "size"), RPINGS)
def test_rping_client_on_siw_verifies_what_the_server_here_writes(siw, end, size):
    ended = f"end: client {end} {size} "
    assert siw.wait_for(ended) == f"{ended}0"
    server = siw.servers[end, size]
    assert server.finish() == 0, server.lines
    if end == "softnd":
        assert server.lines[1:] == [f"server: {ROUNDS} rounds verified"]


def test_siw_ends_a_connection_that_violates_access_with_a_terminate_and_softnd_understands_it(siw):
    lines = siw.softnd_client("access_violation", "access_violation", 64)
    # ND_ACCESS_VIOLATION can come only from the Terminate. A mere loss gives ND_CANCELED.
    assert lines[1:] == ["access_violation: write completed with 0xc0000005, receive with 0xc0000120"]


def test_softnd_ends_a_connection_that_violates_access_with_a_terminate_and_siw_understands_it(siw):
    assert siw.wait_for("end: access_violation ") == "end: access_violation 0"
    server = siw.servers["access_violation"]
    assert server.finish() == 0
    assert server.lines[1:] == ["server: 0 rounds verified"]
    trace = siw.trace.read_text()
    assert "terminating with 0x11100" in trace, trace  # DDP, tagged buffer, invalid STag


@pytest.mark.parametrize(("end", "name"), TALKS)
def test_ndpy_here_is_the_client_of_ndpy_on_siw(siw, end, name):
    siw.wait_for("rping servers are there")
    with example_here(end, client_of(name, "127.0.0.1"), siw.ports[end, name], 120) as client:
        assert client.finish() == 0, client.lines
    assert_client_verified(name, client.lines)


@pytest.mark.parametrize(("end", "name"), TALKS)
def test_ndpy_on_siw_is_the_client_of_ndpy_here(siw, end, name):
    server = siw.servers[end, name]
    ended = siw.wait_for(f"end: example {end} {name} ")
    said = siw.machine.between(f"begin: example {end} {name}", ended)
    assert ended.endswith(" 0"), said + server.lines
    assert_client_verified(name, said)
    assert server.finish() == 0, server.lines
    assert_server_verified(name, server.lines)


@pytest.fixture(scope="module")
def disconnects(siw) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, int]]]:
    """The outcomes of the requests of softnd and of siw when early_disconnect_siw.py ran between them."""
    siw.wait_for("early disconnects: listening")
    arguments = (
        "join",
        "softnd0",
        siw.ports["own disconnects"],
        "127.0.0.1",
        siw.ports["disconnects"],
        DISCONNECTS_COUNT,
    )
    with WindowsProcess(DISCONNECTS, *arguments, limit_s=VM_LIMIT_S, NDPY_PROVIDER=hostile.dll()) as process:
        status = process.finish(VM_LIMIT_S)
    assert status == 0, (process.lines, siw.machine.lines[-20:])
    return json.loads(process.lines[-1]), json.loads(siw.wait_for('{"exchange'))


def test_f_5_4_what_siw_took_and_stayed_for_succeeds_though_softnd_leaves_at_once(disconnects):
    softnd, siw = disconnects
    for what in ("read beyond", "write beyond", "write read-only"):
        assert softnd[f"{what}, give"] == {"SEND SUCCESS": DISCONNECTS_COUNT, "RECEIVE CANCELED": DISCONNECTS_COUNT}
    answered = {"SEND SUCCESS": 4 * DISCONNECTS_COUNT, "RECEIVE SUCCESS": DISCONNECTS_COUNT}
    assert softnd["answered burst, burst_until_answered"] == answered
    assert siw["answered burst, take_burst_and_answer"]["RECEIVE SUCCESS"] == 4 * DISCONNECTS_COUNT


def test_programs_that_ask_for_no_reads_have_their_sends_acknowledged_by_siw(disconnects):
    softnd, siw = disconnects
    answered = {"SEND SUCCESS": 4 * DISCONNECTS_COUNT, "RECEIVE SUCCESS": DISCONNECTS_COUNT}
    assert softnd["without reads, burst_until_answered"] == answered
    assert siw["without reads, take_burst_and_answer"]["RECEIVE SUCCESS"] == 4 * DISCONNECTS_COUNT


def test_siw_takes_252_bytes_of_private_data_and_refuses_508(disconnects):
    softnd, siw = disconnects
    assert siw["private data that came"] == {"252": 2 * DISCONNECTS_COUNT}
    assert softnd["all private data that softnd can send"] == {"refused": 1}


def test_f_6_5_softnd_that_violates_access_on_siw_hears_of_it_and_keeps_what_it_took(disconnects):
    softnd, _ = disconnects
    both_roles = 2 * DISCONNECTS_COUNT
    assert softnd["read beyond, read_beyond"] == {"RECEIVE SUCCESS": both_roles, "READ REMOTE_ERROR": both_roles}
    for what in ("write beyond, write_beyond", "write read-only, write_read_only"):
        assert softnd[what] == {"RECEIVE SUCCESS": both_roles, "WRITE ACCESS_VIOLATION": both_roles}


def test_softnd_takes_all_that_siw_sent_and_leaves(disconnects):
    softnd, _ = disconnects
    assert softnd["private data, take_one"] == {"RECEIVE SUCCESS": 2 * DISCONNECTS_COUNT}
    assert softnd["burst, take_burst"] == {"RECEIVE SUCCESS": 2 * 4 * DISCONNECTS_COUNT}


def test_what_siw_took_just_before_it_left_is_taken_or_canceled_never_anything_else(disconnects):
    """siw closes without the answers that its kernel still has to send. So a Send that it took may be CANCELED."""
    softnd, siw = disconnects
    leaving = {
        what: softnd[what]
        for what in (
            "exchange, exchange",
            "private data, send_nothing",
            "burst, burst",
            "answered burst, take_burst_and_answer",
        )
    }
    for tally in leaving.values():
        assert {request.split()[1] for request in tally} <= {"SUCCESS", "CANCELED", "IO_TIMEOUT"}
    assert sum(tally.get("SEND SUCCESS", 0) for tally in leaving.values()) > 0
    assert siw["private data, take_one"] == {"RECEIVE SUCCESS": DISCONNECTS_COUNT}
    assert siw["burst, take_burst"] == {"RECEIVE SUCCESS": 4 * DISCONNECTS_COUNT}
