"""The thread of an adapter, on its own."""

from __future__ import annotations

import sys
import threading

import pytest

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

from kit.helpers import open_files

from ndpy.objects.resource import Orphans
from ndpy.platforms.verbs.events import EventThread


def test_waking_it_while_it_is_stopped_touches_no_closed_descriptor():
    failures = []
    before = open_files()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            events = EventThread("test", Orphans())

            def wake(events=events):
                try:
                    for _ in range(20):
                        events.wake()
                except OSError as error:
                    failures.append(error)

            waker = threading.Thread(target=wake)
            waker.start()
            events.stop()
            waker.join(20)
            assert not waker.is_alive()
    finally:
        sys.setswitchinterval(interval)
    assert not failures
    assert open_files() == before
