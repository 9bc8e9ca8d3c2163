"""Memory that is sent inline: nobody can resize or free it between the look at its address and the copy."""

from __future__ import annotations

import sys
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

from fake_verbs import fake, fake_verbs_path  # noqa: F401

import ndpy
from ndpy import Flags

# ruff: noqa: F811


@pytest.fixture
def queue_pair(fake):
    with (
        fake.open() as adapter,
        adapter.create_completion_queue(8) as queue,
        adapter.create_queue_pair(queue, inline_data_size=64, max_initiator_sge=4) as queue_pair,
    ):
        queue_pair._begin_connection()
        yield queue_pair


def posting(queue_pair: Any, meanwhile: Any) -> None:
    """Have meanwhile() called when the addresses have been taken, just before the native post."""
    post = queue_pair._post_list

    def posted(*arguments: Any) -> int:
        meanwhile()
        return int(post(*arguments))

    queue_pair._post_list = posted


@pytest.mark.parametrize("post", ["send", "write"])
@pytest.mark.parametrize(
    "wrap", [lambda data: data, memoryview, lambda data: [data, data]], ids=["itself", "view", "two"]
)
def test_inline_memory_cannot_be_resized_before_it_was_copied(queue_pair, post, wrap):
    data, refused = bytearray(b"12345678"), []

    def resize() -> None:
        try:
            data.extend(bytes(1 << 20))
        except BufferError as error:
            refused.append(error)

    posting(queue_pair, resize)
    rest = (ndpy.RemoteMemory(4096, 64, 1),) if post == "write" else ()
    sent = wrap(data)
    getattr(queue_pair, post)(sent, *rest, flags=Flags.INLINE)
    assert refused
    if sent is not data and isinstance(sent, memoryview):
        sent.release()
    # The adapter has copied it.
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
