"""The checks of `ndpy smoke` as tests of pytest, for suites of one's own.

    pytest --pyargs ndpy.smoke --rdma here --rdma-adapter mlx5_0

Each check is a test, whose name `-k` can choose. What the adapter does not claim is skipped, and a quirk that its
driver is known to have is an expected failure.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ndpy
from ndpy.tools.cli.smoke import catalog, testbed
from ndpy.tools.cli.smoke.catalog import Check, Verdict
from ndpy.tools.cli.smoke.report import Reporter, Run
from ndpy.tools.cli.smoke.runner import Runner

#: The time limit of each check, in seconds.
_LIMIT_S = 30.0


@pytest.fixture(scope="module")
def runner(rdma_adapter_name: str) -> Iterator[Runner]:
    """Runs checks on the adapter of --rdma, with a peer in another process."""
    adapter = ndpy.open_adapter(rdma_adapter_name)
    bed = testbed.Testbed(adapter, rdma_adapter_name, None)
    runner = Runner(bed, Run(adapter.info.name, adapter.info.provider), Reporter(0), limit_s=_LIMIT_S)
    yield runner
    runner.end()
    if not runner.stuck:
        adapter.close()


# The objects of the peer and of the connections to it last longer than a check.
@pytest.mark.rdma(leaks=False)
@pytest.mark.parametrize("check", catalog.load(), ids=lambda check: check.full_name)
def test_check(runner: Runner, check: Check) -> None:
    """The claim that `ndpy smoke --list` shows."""
    if runner.stuck:
        pytest.fail("not run, because a check before it never returned", pytrace=False)
    result = runner.run_one(check)
    if result.verdict is Verdict.FAIL:
        pytest.fail(result.reason, pytrace=False)
    elif result.verdict is Verdict.SKIP:
        pytest.skip(result.reason)
    elif result.verdict is Verdict.KNOWN:
        pytest.xfail(f"{result.reason} ({result.reference})")
    print(result.reason)
