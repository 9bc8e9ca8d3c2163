"""The pytest plugin of ndpy: an RDMA adapter in every session. `ndpy.testing` describes it.

pytest loads this in every session of an environment that has ndpy, so it imports ndpy only when a test asks for an
adapter.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    import ndpy
    from ndpy import aio
    from ndpy.testing import Pair, Peer
    from ndpy.testing.faulty import Faults
    from ndpy.testing.leaks import Watch

_WHERE = ("soft", "here", "vm", "none")
_FIXTURES = (
    "rdma_adapter_name",
    "rdma_adapter",
    "rdma_pair",
    "rdma_peer",
    "rdma_cache",
    "rdma_server",
    "rdma_env",
    "rdma_faults",
)
_watch = pytest.StashKey["Watch"]()
_faults = pytest.StashKey["Faults"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rdma", "RDMA (ndpy)")
    group.addoption(
        "--rdma",
        choices=_WHERE,
        help=(
            "Where tests get their adapter. soft, the default: the software adapter of ndpy, without privileges. here: "
            "an adapter of this machine. vm: the whole session runs in a VM with a driver of the kernel. none: tests "
            "that need an adapter are skipped. With this option, every test is checked for objects that it leaves "
            "open."
        ),
    )
    group.addoption(
        "--rdma-adapter", metavar="NAME", help="With --rdma here: the adapter. Default: the first one that is active."
    )
    group.addoption("--rdma-driver", choices=("rxe", "siw"), help="With --rdma vm: the driver. Default: rxe.")
    group.addoption(
        "--rdma-kernel", metavar="VERSION", help="With --rdma vm: the kernel. Default: the newest with the driver."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "rdma(capabilities=None, min_depth=0, quirk=None, leaks=True): the test needs an adapter with these "
        "capabilities and queues of at least this depth, and is skipped if the adapter lacks them. With a quirk that "
        "the adapter is known to have, it has to fail. leaks=False: it is not checked for objects that it leaves open.",
    )
    where = config.getoption("--rdma")
    for option, needed in (("adapter", "here"), ("driver", "vm"), ("kernel", "vm")):
        if config.getoption(f"--rdma-{option}") is not None and where != needed:
            raise pytest.UsageError(f"--rdma-{option} goes with --rdma {needed}")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if config.getoption("--rdma") != "vm" or config.option.help or config.option.version:
        return None
    from ndpy.testing import machine

    return machine.run(config)


# ---- around each test ----


def _is_concerned(item: pytest.Item) -> bool:
    """Whether the test uses an adapter, or the command line says that all do."""
    if item.config.getoption("--rdma") not in (None, "none"):
        return True
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker("rdma") is not None or any(name in names for name in _FIXTURES)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if _is_concerned(item):
        from ndpy.testing import leaks, session

        if session.require(item):
            item.stash[_watch] = leaks.Watch()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[None]:
    watch = _watch_of(request)
    if watch is None or (fixturedef.scope == "function" and fixturedef.argname != "rdma_faults"):
        return (yield)
    # What a fixture for several tests opens may stay open behind this one, and so may the shim, which rdma_faults
    # loads.
    with watch.allowed():
        return (yield)


def _watch_of(request: pytest.FixtureRequest) -> Watch | None:
    item = getattr(request, "_pyfuncitem", None)
    return item.stash.get(_watch, None) if item is not None else None


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed and call.when == "call" and _watch in item.stash:
        from ndpy.testing.outstanding import outstanding

        # The objects are still there: fixtures close them afterwards.
        report.sections.append(("what was outstanding", outstanding()))
    if call.when == "call" and _faults in item.stash:
        report.sections.append(("faults", str(item.stash[_faults].report())))
        item.stash[_faults].failed = report.failed
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    failure = None
    try:
        yield
    except BaseException as error:
        failure = error
    watch = item.stash.get(_watch, None)
    if watch is not None:
        del item.stash[_watch]
        left = watch.end()
        if left and failure is None:
            pytest.fail(left, pytrace=False)
        elif left:
            item.add_report_section("teardown", "left open", left)
    if failure is not None:
        raise failure


# ---- fixtures ----


@pytest.fixture(scope="session")
def rdma_adapter_name(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of the adapter of --rdma, for ndpy.open_adapter(). One for the session."""
    from ndpy.testing import session

    with session.adapter_name(request.config) as name:
        yield name


@pytest.fixture
def rdma_adapter(rdma_adapter_name: str) -> Iterator[ndpy.Adapter]:
    """An open adapter for one test. It is closed at the end. What the test has left open in it is a failure."""
    import ndpy
    from ndpy.testing import leaks

    with leaks.closing(ndpy.open_adapter(rdma_adapter_name)) as adapter:
        yield adapter


@pytest.fixture
def rdma_pair(rdma_adapter: ndpy.Adapter) -> Iterator[Pair]:
    """Two connected ends for one test, `client` and `server`, both in this process.

    Each has a queue pair with 16 places in each queue, a completion queue, and a registered buffer of 64 KiB that the
    other end may read and write. They are closed at the end.
    """
    from ndpy.testing import connected_pair

    with connected_pair(rdma_adapter) as pair:
        yield pair


@pytest.fixture
def rdma_cache(rdma_adapter: ndpy.Adapter) -> Iterator[ndpy.RegistrationCache]:
    """A registration cache of 64 MiB and 1,024 entries for one test. It is closed at the end."""
    import ndpy
    from ndpy.testing import leaks

    with leaks.closing(ndpy.RegistrationCache(rdma_adapter, max_bytes=64 << 20, max_entries=1024)) as cache:
        yield cache


@pytest.fixture
def rdma_server(rdma_adapter: ndpy.Adapter) -> Callable[..., AbstractAsyncContextManager[aio.Server]]:
    """`async with rdma_server(handler) as server` serves connections of ndpy.aio at server.address, a free port of the
    adapter. For one test.

    It takes the options of ndpy.aio.serve(). It needs no plugin for asyncio, and works with each.
    """
    from ndpy import aio
    from ndpy.testing import own_address

    def serve(
        handler: Callable[[aio.Connection], Awaitable[object]], **options: Any
    ) -> AbstractAsyncContextManager[aio.Server]:
        return aio.serve((own_address(rdma_adapter), 0), handler, adapter=rdma_adapter, **options)

    return serve


@pytest.fixture
def rdma_peer(request: pytest.FixtureRequest, rdma_adapter_name: str) -> Iterator[Callable[..., Peer]]:
    """rdma_peer(function, *arguments) runs a function of the test's module as the other end, in another process. For
    one test.

    The function gets an open adapter, a channel with send(value) and get(timeout_s), and the arguments. The test has
    the other end of the channel, and result(timeout_s). What the function prints is in the report of a test that fails.
    At the end of the test it has ten seconds to return. If it raises or hangs, the test fails.
    """
    from ndpy.testing.peers import Peers

    with Peers(request.node, rdma_adapter_name) as peers:
        yield peers.start


@pytest.fixture
def rdma_env(rdma_adapter_name: str) -> dict[str, str]:
    """The environment in which a program in any language finds the same adapter, for subprocess.run(env=...).
    For one test.
    """
    from ndpy.testing import session

    return session.environment(rdma_adapter_name)


@pytest.fixture
def rdma_faults(request: pytest.FixtureRequest, rdma_adapter_name: str, rdma_env: dict[str, str]) -> Iterator[Faults]:
    """`adapter = rdma_faults(Fault("status", operation="send", nth=3, status="RETRY_EXC_ERR"))` opens an adapter with
    faults of ndpy.faults, for one test.

    Adapters that the process opens later have the faults too, on soft0 also those that were open before, and so have
    the peers and programs that the test starts later. They end with the test. Its report says which faults fired, and
    where. A test that ends well while one has never fired fails, unless allow_unfired=True was given.
    The engines of soft0 and softnd make the faults themselves, and for other adapters of Linux the shim does. Other
    adapters of Windows have none, and the test is skipped.
    """
    from ndpy.testing.faulty import Faults

    with Faults(rdma_adapter_name, rdma_env) as faults:
        request.node.stash[_faults] = faults
        yield faults
