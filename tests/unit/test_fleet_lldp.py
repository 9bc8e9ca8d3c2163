"""What lldpctl says of a machine's switches, and what is said if it says nothing."""

from __future__ import annotations

import json
import sys

import pytest

from ndpy.fleet import lldp
from ndpy.fleet.lldp import LldpError, switches

# As lldpctl 1.0.16 prints a Linux bridge and a host.
SWITCH = [{"type": "Bridge", "enabled": True}, {"type": "Router", "enabled": False}]
HOST = [{"type": "Bridge", "enabled": False}, {"type": "Station", "enabled": True}]
ROUTER = {"type": "Router", "enabled": True}


def neighbour(name: str | None, capabilities: object = None) -> dict:
    facts = {"id": {"type": "mac", "value": "00:00:5e:00:53:01"}, "descr": "a switch"}
    if capabilities is not None:
        facts["capability"] = capabilities
    port = {"id": {"type": "ifname", "value": "Ethernet1"}, "ttl": "120"}
    return {"via": "LLDP", "rid": "1", "chassis": {name: facts} if name else facts, "port": port}


def printed(*heard: tuple[str, dict]) -> str:
    """What lldpctl prints if it heard these at these interfaces. One is an object, and several are a list."""
    found = [{interface: told} for interface, told in heard]
    return json.dumps({"lldp": {"interface": found if len(found) > 1 else found[0]} if found else {}})


@pytest.mark.parametrize(
    ("heard", "found"),
    [
        ([], {}),
        ([("eth0", neighbour("sw1"))], {"eth0": "sw1"}),
        ([("eth0", neighbour("sw1", SWITCH)), ("eth1", neighbour("sw2", ROUTER))], {"eth0": "sw1", "eth1": "sw2"}),
        ([("eth0", neighbour(None))], {"eth0": "00:00:5e:00:53:01"}),
        ([("eth0", neighbour(None, SWITCH))], {"eth0": "00:00:5e:00:53:01"}),
        ([("eth0", neighbour("rack 7 top", SWITCH))], {"eth0": "rack_7_top"}),
        # A host at the other end of the cable is no switch.
        ([("eth0", neighbour("n2", HOST))], {}),
        ([("eth0", neighbour("n2", HOST)), ("eth0", neighbour("sw1", SWITCH))], {"eth0": "sw1"}),
        # A hub between two of them.
        ([("eth0", neighbour("sw1", SWITCH)), ("eth0", neighbour("sw2", SWITCH))], {}),
    ],
)
def test_the_switch_at_each_interface_is_known(heard, found):
    assert switches(printed(*heard)) == found


@pytest.mark.parametrize("answer", ["", "[]", "null", '{"lldp": []}', '{"lldp": {"interface": [1]}}', "[" * 100_000])
def test_what_lldpctl_does_not_print_is_refused(answer):
    with pytest.raises(LldpError, match="cannot be understood"):
        switches(answer)


def test_names_and_their_number_are_bounded():
    heard = [(f"eth{at}", neighbour("s" * 1000)) for at in range(1000)]
    found = switches(printed(*heard))
    assert len(found) == 256 and set(found.values()) == {"s" * 64}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    if sys.platform == "win32":
        pytest.skip("lldpd is of Unix")
    monkeypatch.setattr("shutil.which", lambda name, path: str(tmp_path / name))

    def make(script: str):
        program = tmp_path / "lldpctl"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)

    return make


def test_it_is_asked_for_json(stand_in):
    stand_in(f"""[ "$*" = "-f json" ] && cat <<'END'\n{printed(("eth0", neighbour("sw1")))}\nEND""")
    assert lldp.ask() == {"eth0": "sw1"}


def test_a_failure_has_its_words_and_what_to_look_at(stand_in):
    stand_in("echo 'unable to connect to socket' >&2; exit 1")
    with pytest.raises(LldpError, match=r"lldpctl: unable to connect to socket; does lldpd run"):
        lldp.ask()


def test_a_program_that_hangs_is_ended(stand_in, monkeypatch):
    monkeypatch.setattr(lldp, "_LIMIT_S", 0.2)
    stand_in("exec sleep 60")
    with pytest.raises(LldpError, match=r"did not end within 0.2 s"):
        lldp.ask()


def test_without_lldpd_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name, path: None)
    with pytest.raises(LldpError, match="install lldpd"):
        lldp.ask()
