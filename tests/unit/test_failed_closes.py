"""A close that the system refuses loses nothing and can be repeated: over a provider without a device."""

from __future__ import annotations

import errno
import sys
import threading
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

from racing import DEADLINE_S, Elsewhere

import ndpy
from ndpy.verbs import adapter as adapters
from ndpy.verbs import listener as listeners
from ndpy.verbs.native_calls import lib


class Refusing:
    """The extension's functions, of which one fails."""

    def __init__(self, call: str, number: int) -> None:
        setattr(self, call, lambda *_: number)

    def __getattr__(self, name: str) -> Any:
        return getattr(lib, name)


@pytest.mark.parametrize("call", ["ibv_dealloc_pd", "ibv_close_device"])
def test_an_adapter_whose_close_failed_can_be_closed(fake, monkeypatch, call):
    adapter = fake.open()
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "lib", Refusing(call, errno.EBUSY))
        with pytest.raises(ndpy.ProviderError):
            adapter.close()
    with pytest.raises(ndpy.ClosedError):
        adapter.create_completion_queue(8)
    adapter.close()
    assert adapter.closed


def test_a_listener_whose_close_failed_serves_those_who_ask_it(fake, monkeypatch):
    fake.have_address()
    with fake.open() as adapter:
        listener = adapter.listen(("127.0.0.1", 0))
        asked = listener.begin_get_request()
        with monkeypatch.context() as patch:
            patch.setattr(listeners, "lib", Refusing("rdma_destroy_id", errno.EIO))
            with pytest.raises(ndpy.ProviderError):
                listener.close()
        fake.request(listener)
        asked.result(DEADLINE_S).close()
        late = listener.begin_get_request()
        listener.close()
        with pytest.raises(ndpy.CanceledError):
            late.result(DEADLINE_S)


def test_closing_the_adapter_waits_for_all_that_threads_release_at_the_same_time(fake, monkeypatch):
    """A second one comes when the first is noted and does not run yet."""
    adapter, gate, first = fake.open(), threading.Event(), []
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if not first:
            first.append(thread)
            adapter._in_background(lambda: None)
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_late)
        adapter._in_background(lambda: gate.wait(DEADLINE_S))
    closing = Elsewhere(adapter.close).start()
    closing.thread.join(0.1)
    assert closing.thread.is_alive()
    gate.set()
    closing.result()
