"""The adapter of a test session, and what a test asks of it."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import sys
from collections.abc import Iterator

import pytest

import ndpy
from ndpy import platforms
from ndpy.platforms.networkdirect import softnd_installation
from ndpy.platforms.verbs import softverbs
from ndpy.vocabulary.quirks import Quirk, quirks_of


def where(config: pytest.Config) -> str:
    return config.getoption("--rdma") or "soft"


@contextlib.contextmanager
def adapter_name(config: pytest.Config) -> Iterator[str]:
    """The name of the session's adapter, which ndpy.list_adapters() lists meanwhile.
    One that is absent is a failure.
    """
    name = _find(config).name
    with platforms.asking_for(name):
        yield name


def _find(config: pytest.Config) -> ndpy.AdapterInfo:
    place = where(config)
    if place == "none":
        pytest.skip("it needs an RDMA adapter, and --rdma none says that there is none")
    try:
        return _info(config.getoption("--rdma-adapter") if place == "here" else _soft())
    except (ndpy.AdapterNotFoundError, ndpy.ProviderNotFoundError) as error:
        text = f"the adapter of --rdma {place} is not usable: {error}"
        raise pytest.fail.Exception(text, pytrace=False) from None


def _soft() -> str:
    if sys.platform == "linux":
        return "soft0"
    os.environ.setdefault("NDPY_PROVIDER", str(softnd_installation.find()))
    return "softnd0"


def executor(name: str) -> str | None:
    """What makes the faults of a scenario at an adapter. None: nothing does."""
    if sys.platform == "linux":
        return "engine" if name == softverbs.NAME else "shim"
    return "softnd" if _info(name).driver == softnd_installation.DLL else None


def require(item: pytest.Item) -> bool:
    """What the marker of a test asks for. Skips if the adapter lacks it, and fails if there is no adapter.

    Returns whether the test is checked for objects that it leaves open.
    """
    marker = item.get_closest_marker("rdma")
    place = where(item.config)
    if place == "none":
        if marker is not None:
            pytest.skip("it needs an RDMA adapter, and --rdma none says that there is none")
        return False
    if marker is not None and marker.kwargs == {"leaks": False}:
        # It asks for nothing. The fixtures look for an adapter if the test uses one.
        return False
    try:
        info = _find(item.config)
    except pytest.fail.Exception:
        if marker is not None:
            raise
        return False
    return _require(item, info, **marker.kwargs) if marker is not None else True


def _require(
    item: pytest.Item,
    info: ndpy.AdapterInfo,
    capabilities: ndpy.Capability | None = None,
    min_depth: int = 0,
    quirk: Quirk | None = None,
    leaks: bool = True,
) -> bool:
    require_capabilities(info, capabilities or ndpy.Capability(0))
    depth = min(info.max_completion_queue_depth, info.max_initiator_queue_depth, info.max_receive_queue_depth)
    if depth < min_depth:
        pytest.skip(f"the queues of {info.name} have {depth} places, and the test needs {min_depth}")
    if quirk is not None:
        expect_quirk(item, info, quirk)
    return leaks


def require_capabilities(info: ndpy.AdapterInfo, wanted: ndpy.Capability) -> None:
    """Skip unless the adapter claims all of these. The reason names those that are missing."""
    missing = [str(one.name) for one in ndpy.Capability if one in wanted and one not in info.capabilities]
    if missing:
        pytest.skip(f"{info.name} does not claim {' and '.join(missing)}")


def expect_quirk(item: pytest.Item, info: ndpy.AdapterInfo, quirk: Quirk) -> bool:
    """Expect the test to fail if driver and kernel are known to have the quirk. If it passes there, that is a failure
    too. A test that would bring the machine down is skipped.

    Returns whether they are known to have it.
    """
    facts = quirk.value
    if quirk not in quirks_of(info) or not facts.is_in(platform.release()):
        return False
    reason = f"{facts.summary} ({facts.reference})"
    if facts.crashes_machine:
        pytest.skip(reason)
    item.add_marker(pytest.mark.xfail(strict=True, reason=reason))
    return True


@functools.cache
def _info(name: str | None) -> ndpy.AdapterInfo:
    with ndpy.open_adapter(name) as adapter:
        return adapter.info


def environment(name: str) -> dict[str, str]:
    """The environment of a program that uses this adapter."""
    if name == "soft0":
        return softverbs.environment(softverbs.folder(), os.environ)
    return {**os.environ, "NDPY_ADAPTER": name}
