"""Fixtures of all tests: an adapter, connected queue pairs, caches and random numbers. They close what they made.

The plugin of pytest that ndpy brings provides the adapter, and looks at what each test leaves open. With `--adapter
NAME` the tests use that adapter, and fail if it is absent: it is short for `--rdma here --rdma-adapter NAME`. Without
it they use the one of NDPY_ADAPTER, or else soft0, and softnd under Windows.

With `--peer ADDRESS:PORT` the other end of a connection is on another host, where `python tests/kit/remote.py --listen
ADDRESS:PORT` runs. The adapter has the same name there. tests/contract/test_connector.py, test_listener.py,
test_retry_policy.py and test_queue_pair_endings.py can do this.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import signal
import sys
from importlib import metadata

import pytest
from kit import remote
from kit.deadlines import DEADLINE_S, PATIENCE
from kit.helpers import SEED, Keeper, Pair, connect_pair, peer_of, peering, require
from kit.loops import each_loop as each_loop
from kit.loops import each_loop_where_quick as each_loop_where_quick

import ndpy
from ndpy.platforms.verbs import softverbs
from ndpy.testing import leaks

pytest_plugins = ["pytester"]
if not any(entry.value == "pytest_ndpy" for entry in metadata.entry_points(group="pytest11")):
    # A checkout that is not installed, as under Wine.
    pytest_plugins.append("pytest_ndpy")

# A shell starts background jobs with Ctrl-C ignored. Programs that the tests start and interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--adapter", metavar="NAME", help="run on this adapter, and fail if it is absent")
    parser.addoption("--peer", metavar="ADDRESS:PORT", type=remote.address_of, help="the other ends are on this host")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # On a busy machine a connection of soft0 takes its time to end.
    leaks._GRACE_S = DEADLINE_S
    name = config.getoption("--adapter") or os.environ.get("NDPY_ADAPTER")
    if name:
        config.option.rdma, config.option.rdma_adapter = "here", name


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # The plugin's look at what a test leaves takes milliseconds, and in an emulated machine ten times that. With --peer
    # connections to the other host come when they are needed, and stay.
    watched = config.option.rdma_adapter in (None, softverbs.NAME) and not config.getoption("--peer")
    for item in () if watched else items:
        item.add_marker(pytest.mark.rdma(leaks=False))
    # On a busy machine, a test that hangs has as much more time as the deadlines in it.
    usual = float(config.getoption("timeout", None) or config.getini("timeout") or 0)
    for item in items if PATIENCE > 1 else ():
        marker = item.get_closest_marker("timeout")
        seconds = marker.args[0] if marker and marker.args else usual
        item.add_marker(pytest.mark.timeout(PATIENCE * seconds), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own, and fails if it hangs."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), 4 * DEADLINE_S))
    return True


@pytest.fixture(autouse=True, scope="module")
def small_heap() -> None:
    """Spare each collection of garbage what pytest has collected. A test may have undone it for those that follow."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def adapter_name(rdma_adapter_name: str) -> str:
    """The name of the adapter under test. soft0 is in the list of adapters meanwhile."""
    return rdma_adapter_name


@pytest.fixture(scope="session")
def peer_host(request: pytest.FixtureRequest):
    """The host of --peer. None without it."""
    address = request.config.getoption("--peer")
    if address is None:
        yield None
        return
    with remote.connect(address, timeout_s=90) as host:
        yield host


@pytest.fixture
def adapter(rdma_adapter, peer_host):
    """An open adapter. It is closed at the end, and that fails if one of its objects is still open."""
    with peering(rdma_adapter, peer_host, rdma_adapter.info.name):
        yield rdma_adapter
    rdma_adapter.close()


@pytest.fixture
def peer(adapter) -> ndpy.Adapter:
    """The adapter for the other end of a connection: with --peer that of the other host, else the same one."""
    return peer_of(adapter)


@pytest.fixture
def keep(adapter):
    """keep(thing) returns the thing and closes it at the end. An object closes before the objects that it uses."""
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def pair(keep, adapter) -> Pair:
    """Two queue pairs, connected to each other. Each has its own completion queue. With --peer the server is there."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return connect_pair(keep, adapter)


@pytest.fixture
def pair_with(keep, adapter):
    """pair_with(**options) makes a connected pair with these options of create_end()."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS)
    return lambda **options: connect_pair(keep, adapter, **options)


@pytest.fixture
def window_pair(keep, adapter) -> Pair:
    """The same as `pair`. Skips the test if the adapter has no memory windows."""
    require(adapter, ndpy.Capability.LOOPBACK_CONNECTIONS, ndpy.Capability.MEMORY_WINDOWS)
    return connect_pair(keep, adapter)


@pytest.fixture
def cache(keep, adapter):
    """A registration cache that is never full in these tests."""
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64))


@pytest.fixture
def monitored(keep, adapter):
    """A registration cache with a monitor. Only Linux has one."""
    if sys.platform != "linux":
        pytest.skip("only Linux tells of memory that is unmapped")
    return keep(ndpy.RegistrationCache(adapter, max_bytes=64 << 20, max_entries=64, monitor=True))


@pytest.fixture
def rng():
    """A random generator. A failure shows its seed; NDPY_TEST_SEED sets it."""
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    return random.Random(SEED)
