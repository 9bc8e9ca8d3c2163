"""What errors say about ways that cannot be resolved, and about a process that may open no more files."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import types

import pytest
from kit import linux_only as linux_only
from kit.deadlines import DEADLINE_S

import ndpy
from ndpy import errors, platforms
from ndpy.platforms.verbs import manager, native_calls
from ndpy.platforms.verbs.native_calls import lib
from ndpy.vocabulary import routes

SERVER = ("127.0.0.1", 7471)
EVENTS = {"address": lib.RDMA_CM_EVENT_ADDR_ERROR, "route": lib.RDMA_CM_EVENT_ROUTE_ERROR}

#: The words of each errno, and those that another one has.
WORDS = {
    errno.ENODEV: "an RDMA adapter of this network namespace",
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
    """From here on this process may open nothing, or as many files as it is told."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def begin(count=0):
        found = [os.open("/dev/null", os.O_RDONLY) for _ in range(count + 1)]
        for descriptor in found:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (found[-1], hard))

    yield begin
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_poller_without_a_descriptor_names_the_limit(no_descriptor):
    no_descriptor()
    with pytest.raises(
        ndpy.InsufficientResourcesError, match=r"RLIMIT_NOFILE is \d+; close what is not needed"
    ) as caught:
        ndpy.Poller()
    assert (caught.value.operation, caught.value.native) == ("poller", errno.EMFILE)


def test_a_route_that_cannot_be_asked_for_is_not_taken_for_none(no_descriptor):
    info = types.SimpleNamespace(name="card0", addresses=("127.0.0.1",))
    no_descriptor()
    with pytest.raises(
        ndpy.InsufficientResourcesError, match=r"no way to 127\.0\.0\.1 can be looked for: .*RLIMIT_NOFILE"
    ):
        routes.find_route(info, socket.AF_INET, ("127.0.0.1", 4000), dict)


@pytest.mark.parametrize("count", [0, 3])
def test_a_look_for_adapters_with_few_descriptors_is_not_taken_for_none(no_descriptor, count):
    down = types.SimpleNamespace(name="card0", state="down", ports=(), addresses=())
    with pytest.raises(ndpy.AdapterNotFoundError, match="no adapter has an active port"):
        platforms.choose([down], None)
    no_descriptor(count)
    with pytest.raises(ndpy.InsufficientResourcesError, match=r"an adapter cannot be looked for: .*RLIMIT_NOFILE"):
        platforms.choose([down], None)


def test_a_library_without_a_descriptor_is_not_taken_for_missing(no_descriptor):
    paths = ["/usr/lib/libabsent.so.1", "/usr/lib/libabsent.so.2"]
    failed, reason = native_calls._load(lib.NDPY_SYSTEM, paths)
    assert failed == 1 and paths[0] in reason
    no_descriptor()
    with pytest.raises(ndpy.InsufficientResourcesError, match=rf"{paths[0]} cannot be loaded: .*RLIMIT_NOFILE"):
        native_calls._load(lib.NDPY_SYSTEM, paths)


def test_an_adapter_without_a_descriptor_for_its_thread_names_the_limit(fake, monkeypatch):
    def refuse():
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(select, "epoll", refuse)
    with pytest.raises(ndpy.InsufficientResourcesError, match=r"open adapter: .*RLIMIT_NOFILE"):
        fake.open()


def test_a_full_system_is_told_apart_from_a_full_process():
    assert "fs.file-max" in str(errors.from_errno("poller", errno.ENFILE))
    assert "fs.file-max" not in str(errors.from_errno("poller", errno.EMFILE, "whatever was tried"))
    assert "whatever was tried: this process" in str(errors.from_errno("poller", errno.EMFILE, "whatever was tried"))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EMFILE, "RLIMIT_NOFILE"),
        (errno.ENFILE, "fs.file-max"),
        (errno.ENOMEM, "no memory left"),
        (errno.ENOBUFS, "no buffers left"),
        (errno.EPERM, "firewall"),
        (errno.EACCES, "Permission denied"),
    ],
)
def test_an_attempt_that_this_machine_refuses_is_no_silence_of_the_peer(number, words):
    adapter = types.SimpleNamespace(info=types.SimpleNamespace(name="fake0", transport="RoCE"))
    way = manager.Way(adapter, "192.0.2.1 port 9", "connect")
    for made in (way.unreachable(number), way._unresolved(number)):
        assert not isinstance(made, ndpy.TimeoutError)
        assert "192.0.2.1 port 9" in str(made) and f"{number} ({errno.errorcode[number]})" in str(made)
    assert words in str(way.unreachable(number))
    assert isinstance(way.unreachable(errno.ETIMEDOUT), ndpy.TimeoutError)


def test_a_wait_without_a_free_descriptor_says_so():
    assert "descriptor" not in str(errors.not_finished("get_request", 1.5))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Descriptors 0 to 2 are open, so that none below this limit is free.
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        made = errors.not_finished("get_request", 1.5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert str(made).startswith("get_request: not finished within 1.5 s; this process has no file descriptor left")
    assert "RLIMIT_NOFILE is 3" in str(made)
