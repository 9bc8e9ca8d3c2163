"""Windows' list of interfaces may change while it is read."""

import psutil
import pytest

from ndpy.networkdirect import interfaces


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
