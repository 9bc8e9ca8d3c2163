"""What errors say about ways that cannot be resolved, and about a process that may open no more files."""

from __future__ import annotations

import errno
import os
import select
import sys

import pytest
from deadlines import DEADLINE_S

import ndpy

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

import resource

from ndpy import errors
from ndpy.verbs.native_calls import lib

SERVER = ("127.0.0.1", 7471)
EVENTS = {"address": lib.RDMA_CM_EVENT_ADDR_ERROR, "route": lib.RDMA_CM_EVENT_ROUTE_ERROR}

#: The words of each errno, and those that another one has.
WORDS = {
    errno.ENODEV: "no RDMA adapter of this network namespace",
    errno.ETIMEDOUT: "no answer to address resolution; check the address, the link and `ip neigh`",
    errno.ENETUNREACH: "there is no route; `ip route get`",
    errno.EHOSTUNREACH: "the host or its router is not there",
    errno.EINVAL: "do not fit together",
    errno.EADDRNOTAVAIL: "the local address has gone",
}


@pytest.fixture
def adapter(fake):
    fake.have_address()
    fake.connecting.silent = 1
    with fake.open() as adapter:
        yield adapter


def failed_attempt(fake, adapter, event, status):
    with (
        adapter.create_completion_queue(4) as cq,
        adapter.create_queue_pair(cq) as queue_pair,
        adapter.create_connector() as connector,
    ):
        pending = connector.begin_connect(queue_pair, SERVER)
        fake.connection_event(connector, event, status)
        with pytest.raises(ndpy.ProviderError) as caught:
            pending.result(DEADLINE_S)
    return caught.value


@pytest.mark.parametrize("step", EVENTS)
@pytest.mark.parametrize("number", WORDS, ids=errno.errorcode.get)
def test_each_errno_of_the_resolution_has_its_own_sentence(fake, adapter, step, number):
    error = failed_attempt(fake, adapter, EVENTS[step], -number)
    assert type(error) is ndpy.AddressUnreachableError
    assert (error.native, error.operation) == (number, "connect")
    text = str(error)
    assert text.startswith("connect: the way from fake0 to 127.0.0.1 port 7471 cannot be resolved: ")
    assert [other for other in WORDS if WORDS[other] in text] == [number]
    assert f"[native status {number} ({errno.errorcode[number]})]" in text


def test_an_errno_without_a_sentence_has_the_systems(fake, adapter):
    error = failed_attempt(fake, adapter, EVENTS["address"], -errno.EILSEQ)
    assert os.strerror(errno.EILSEQ) in str(error) and "127.0.0.1 port 7471" in str(error)
    assert "ip neigh" not in str(error)


@pytest.mark.parametrize("event", [*EVENTS.values(), lib.RDMA_CM_EVENT_UNREACHABLE], ids=[*EVENTS, "connect"])
def test_a_resolution_without_a_descriptor_names_the_limit(fake, adapter, event):
    error = failed_attempt(fake, adapter, event, -errno.EMFILE)
    assert type(error) is ndpy.InsufficientResourcesError
    assert f"RLIMIT_NOFILE is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}" in str(error)
    assert "ulimit -n" in str(error) and "resolved" not in str(error)


@pytest.fixture
def no_descriptor():
    """From here on this process may open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def begin():
        free = os.open("/dev/null", os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))

    yield begin
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_poller_without_a_descriptor_names_the_limit(no_descriptor):
    no_descriptor()
    with pytest.raises(
        ndpy.InsufficientResourcesError, match=r"RLIMIT_NOFILE is \d+; close what is not needed"
    ) as caught:
        ndpy.Poller()
    assert (caught.value.operation, caught.value.native) == ("poller", errno.EMFILE)


def test_an_adapter_without_a_descriptor_for_its_thread_names_the_limit(fake, monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(select, "epoll", refuse)
    with pytest.raises(ndpy.InsufficientResourcesError, match=r"open adapter: .*RLIMIT_NOFILE"):
        fake.open()


def test_a_full_system_is_told_apart_from_a_full_process():
    assert "fs.file-max" in str(errors.from_errno("poller", errno.ENFILE))
    assert "fs.file-max" not in str(errors.from_errno("poller", errno.EMFILE, "whatever was tried"))
    assert "whatever was tried" not in str(errors.from_errno("poller", errno.EMFILE, "whatever was tried"))
