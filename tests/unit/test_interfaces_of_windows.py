"""Windows' list of interfaces may change while it is read."""

from collections import namedtuple

import psutil
import pytest

from ndpy import NetworkInterface
from ndpy.platforms.networkdirect import interfaces


@pytest.mark.parametrize(
    ("ask", "name"), [(interfaces.statistics, "net_if_stats"), (interfaces.addresses, "net_if_addrs")]
)
def test_an_interface_that_comes_meanwhile_is_no_failure(monkeypatch, ask, name):
    answers = [RuntimeError("GetAdaptersAddresses() syscall failed."), OSError(111, "overflow"), {"eth0": "up"}]

    def answer():
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(psutil, name, answer)
    assert ask() == {"eth0": "up"}


def test_a_failure_that_stays_is_told(monkeypatch):
    asked = []

    def answer():
        asked.append(1)
        raise RuntimeError("GetAdaptersAddresses() syscall failed.")

    monkeypatch.setattr(psutil, "net_if_stats", answer)
    with pytest.raises(RuntimeError, match="GetAdaptersAddresses"):
        interfaces.statistics()
    assert 3 < len(asked) < 100


def test_the_interfaces_of_an_adapter_are_those_with_its_addresses(monkeypatch):
    Address = namedtuple("Address", "address")
    own = {"Ethernet 2": ["00-11-22", "192.0.2.7", "fe80::7%12"], "Wi-Fi": ["192.0.2.8"], "vEthernet": ["198.51.100.7"]}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {name: list(map(Address, own[name])) for name in own})
    assert interfaces.with_any_of(("198.51.100.7", "192.0.2.7", "fe80::7%12")) == (
        NetworkInterface("Ethernet 2", "unknown", None, None, ("192.0.2.7", "fe80::7%12")),
        NetworkInterface("vEthernet", "unknown", None, None, ("198.51.100.7",)),
    )
