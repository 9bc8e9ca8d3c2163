"""The event loops with which the tests of asyncio run: those of Python on this system, and uvloop or winloop if it is
installed.

Each kind runs in the usual tests of waiting. Other tests of asyncio run with Python's own default loop there. With the
other kinds they run on soft0, where they take seconds, and with NDPY_STRESS=1 everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
from collections.abc import Callable

import pytest

from kit.helpers import STRESS
from ndpy.platforms.verbs import softverbs

WINDOWS = sys.platform == "win32"
FASTER = "winloop" if WINDOWS else "uvloop"
# Python's own default first.
NAMES = ["ProactorEventLoop", "SelectorEventLoop", FASTER] if WINDOWS else ["SelectorEventLoop", FASTER]
# What its library opens for ever is no leak of the test that uses it first.
with contextlib.suppress(ImportError):
    importlib.import_module(FASTER)


def factory_of(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """What makes a loop of this name. Skips if it is not installed."""
    if name == FASTER:
        return pytest.importorskip(name, reason=f"{name} is not installed").new_event_loop
    return getattr(asyncio, name)


def _use(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make = factory_of(name)
    monkeypatch.setattr(asyncio, "new_event_loop", make)
    monkeypatch.setattr(asyncio.events, "new_event_loop", make)


@pytest.fixture(params=NAMES)
def each_loop(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio.run() and asyncio.new_event_loop() make loops of each kind."""
    _use(request.param, monkeypatch)


@pytest.fixture(params=NAMES)
def each_loop_where_quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, adapter_name: str) -> None:
    """The same, in the usual run on soft0 only."""
    if request.param != NAMES[0] and not STRESS and adapter_name != softverbs.NAME:
        pytest.skip("with NDPY_STRESS=1 only: it takes long on this adapter")
    _use(request.param, monkeypatch)
