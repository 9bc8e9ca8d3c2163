"""Fixtures for the tests without an adapter: a verbs provider without a device, and points between its calls."""

import sys

import pytest
from faked_machine import no_adapter, tree  # noqa: F401
from perf_ends import perf, serving, world  # noqa: F401

if sys.platform == "linux":
    from data_path_provider import provider, provider_path  # noqa: F401
    from fake_verbs import connected, fake, fake_softverbs_path, fake_verbs_path, soft  # noqa: F401
    from kit.fake_cuda import cuda, fake_cuda_path, unmappable  # noqa: F401
    from posting_ends import cq, queues  # noqa: F401
    from racing import adapter, points, scene  # noqa: F401


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Note on the item that its test failed. Its fixtures read that."""
    outcome = yield
    if call.when == "call":
        item.failed = outcome.get_result().failed


@pytest.fixture
def queue(adapter):
    """A completion queue of the module's adapter."""
    with adapter.create_completion_queue(64) as queue:
        yield queue


@pytest.fixture
def queue_pair(adapter, queue):
    """A queue pair of the module's adapter. Nothing is connected."""
    with adapter.create_queue_pair(queue) as queue_pair:
        yield queue_pair


@pytest.fixture
def unraisable(monkeypatch):
    """The exceptions that go to sys.unraisablehook, by kind and words."""
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: seen.append((what.exc_type, str(what.exc_value))))
    return seen
