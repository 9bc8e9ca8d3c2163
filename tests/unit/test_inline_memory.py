"""Memory that is sent inline. Nobody can resize or free it after the look at its address and before the copy."""

from __future__ import annotations

from typing import Any

import pytest
from kit import linux_only as linux_only

import ndpy
from ndpy import Flags


@pytest.fixture
def queue_pair(fake):
    with (
        fake.open() as adapter,
        adapter.create_completion_queue(8) as queue,
        adapter.create_queue_pair(queue, inline_data_size=64, max_initiator_sge=4) as queue_pair,
    ):
        queue_pair._begin_connection()
        yield queue_pair


def posting(fake: Any, meanwhile: Any) -> None:
    """Call meanwhile() in the next post, just before the native post."""

    def on_point(name: bytes, after: int) -> None:
        if name == b"ibv_post_send" and not after:
            fake.call_at_points(None)
            meanwhile()

    fake.call_at_points(on_point)


@pytest.mark.parametrize("post", ["send", "write"])
@pytest.mark.parametrize(
    "wrap", [lambda data: data, memoryview, lambda data: [data, data]], ids=["itself", "view", "two"]
)
def test_inline_memory_cannot_be_resized_before_it_was_copied(fake, queue_pair, post, wrap):
    data, refused = bytearray(b"12345678"), []

    def resize() -> None:
        try:
            data.extend(bytes(1 << 20))
        except BufferError as error:
            refused.append(error)

    posting(fake, resize)
    rest = (ndpy.RemoteMemory(4096, 64, 1),) if post == "write" else ()
    sent = wrap(data)
    getattr(queue_pair, post)(sent, *rest, flags=Flags.INLINE)
    assert refused
    if sent is not data and isinstance(sent, memoryview):
        sent.release()
    # The adapter has copied the data.
    data.extend(b"9")


def test_inline_memory_is_free_again_although_the_post_was_refused(queue_pair):
    data = bytearray(65)
    with pytest.raises(ndpy.LimitExceededError) as refused:
        queue_pair.send(data, flags=Flags.INLINE)
    data.append(0)
    assert refused
    with pytest.raises(TypeError) as wrong:
        queue_pair.send([data, "text"], flags=Flags.INLINE)
    data.append(0)
    assert wrong


@pytest.mark.parametrize("form", ["slice", "region", "two"])
def test_a_registered_buffer_cannot_be_resized_either_although_its_region_is_closed_meanwhile(fake, queue_pair, form):
    data, refused = bytearray(64), []
    region = queue_pair.adapter.register(data)

    def close_and_resize() -> None:
        region.close()
        try:
            data.extend(bytes(1 << 20))
        except BufferError:
            refused.append(True)

    sent = {"slice": region[0:8], "region": region, "two": [region[0:8], region[8:16]]}[form]
    posting(fake, close_and_resize)
    queue_pair.send(sent, flags=Flags.INLINE)
    assert refused
    # The adapter has copied the data.
    data.append(0)


@pytest.mark.parametrize(("wrong", "error"), [({}, ndpy.LimitExceededError), ({"context": -1}, ValueError)])
def test_a_registered_buffer_is_free_again_although_the_post_was_refused(queue_pair, wrong, error):
    data = bytearray(65)
    with queue_pair.adapter.register(data) as region, pytest.raises(error) as refused:
        queue_pair.send(region[0:65], flags=Flags.INLINE, **wrong)
    data.append(0)
    assert refused
