"""A process that can open few more files or none: each call works, or names the limit."""

from __future__ import annotations

import contextlib
import os

import pytest
from kit import linux_only as linux_only
from kit.helpers import host_of, require

import ndpy

#: More than any of these calls opens at a time.
MOST = 8


@contextlib.contextmanager
def free_descriptors(count):
    """This process may open `count` more files, and no other."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = [os.open(os.devnull, os.O_RDONLY) for _ in range(count + 1)]
    for descriptor in found:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (found[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def open_adapter(adapter):
    ndpy.open_adapter(adapter.info.name).close()


def make_queue(adapter):
    adapter.create_completion_queue(4).close()


def make_queue_pair(adapter):
    with adapter.create_completion_queue(4) as queue:
        adapter.create_queue_pair(queue).close()


def listen(adapter):
    adapter.listen((host_of(adapter), 0)).close()


def listen_at_a_name(adapter):
    try:
        adapter.listen(("localhost", 0)).close()
    except ndpy.AddressUnreachableError as error:
        # It may be an address of another adapter.
        assert error.operation != "resolve"


def connect(adapter):
    """To the adapter's own address, where nobody listens."""
    with (
        adapter.create_completion_queue(4) as queue,
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.create_connector() as connector,
    ):
        connector.begin_connect(queue_pair, (host_of(adapter), 9)).cancel()


def connect_elsewhere(adapter):
    """By an address that needs a look at the machine's interfaces."""
    with (
        adapter.create_completion_queue(4) as queue,
        adapter.create_queue_pair(queue) as queue_pair,
        adapter.create_connector() as connector,
        contextlib.suppress(ndpy.AddressUnreachableError),
    ):
        connector.begin_connect(queue_pair, ("203.0.113.77", 9)).cancel()


def make_poller(adapter):
    ndpy.Poller().close()


def make_cache(adapter):
    with ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=4) as cache:
        cache.local(bytearray(64)).release()


CALLS = (
    open_adapter,
    make_queue,
    make_queue_pair,
    listen,
    listen_at_a_name,
    connect,
    connect_elsewhere,
    make_poller,
    make_cache,
)


#: Whether these open a descriptor is the provider's affair.
PERHAPS_NONE = (listen, listen_at_a_name, make_cache)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_call_without_a_descriptor_names_the_limit(adapter, call):
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    # What it imports and starts stays open.
    call(adapter)
    refused = []
    for count in range(MOST):
        with free_descriptors(count):
            try:
                call(adapter)
            except ndpy.InsufficientResourcesError as error:
                assert "no file descriptor left" in str(error) and "RLIMIT_NOFILE" in str(error), count
                refused.append(count)
    assert 0 in refused or call in PERHAPS_NONE
