"""Fixtures of all tests: an adapter, two connected queue pairs, and closing everything with a check.

`--adapter NAME` names the adapter, and its absence is a failure then. Without it the tests take what
ndpy.open_adapter() would take, and skip with a reason where there is none.
"""

from __future__ import annotations

import os
import random
import signal
import sys

import pytest
from helpers import SEED, Keeper, Pair, connect_pair, require

import ndpy

# Shells start a background job with Ctrl-C ignored, and so would be whatever the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--adapter", metavar="NAME", help="run on this adapter, and fail if it is absent")


@pytest.fixture(scope="session")
def adapter_name(request: pytest.FixtureRequest) -> str:
    """The name of the adapter under test."""
    wanted = request.config.getoption("--adapter")
    try:
        with ndpy.open_adapter(wanted) as adapter:
            name: str = adapter.info.name
            return name
    except (ndpy.AdapterNotFoundError, ndpy.ProviderNotFoundError) as error:
        if wanted or os.environ.get("NDPY_ADAPTER"):
            pytest.fail(f"the adapter asked for is not usable: {error}")
        pytest.skip(f"no adapter: {error}")


@pytest.fixture
def adapter(adapter_name):
    """An open adapter; at the end nothing that was made from it may still be open."""
    adapter = ndpy.open_adapter(adapter_name)
    yield adapter
    adapter.close()


@pytest.fixture
def keep(adapter):
    """keep(thing) closes the thing at the end, users before what they use, and returns it."""
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def pair(keep, adapter) -> Pair:
    """Two queue pairs of one process, connected to each other, each with a completion queue."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return connect_pair(keep, adapter)


@pytest.fixture
def pair_with(keep, adapter):
    """Make a connected pair with other options than the usual ones."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return lambda **options: connect_pair(keep, adapter, **options)


@pytest.fixture
def window_pair(keep, adapter) -> Pair:
    """The same, on an adapter that has memory windows."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS, ndpy.Capability.MEMORY_WINDOWS)
    return connect_pair(keep, adapter)


@pytest.fixture
def cache(keep, adapter):
    """A cache with room for all of a test."""
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64))


@pytest.fixture
def monitored(keep, adapter):
    """A cache with a monitor, which Linux has."""
    if sys.platform != "linux":
        pytest.skip("this system does not tell of unmapping")
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64, monitor=True))


@pytest.fixture
def rng():
    """A random generator whose seed is shown with a failure; NDPY_TEST_SEED sets another one."""
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    return random.Random(SEED)
