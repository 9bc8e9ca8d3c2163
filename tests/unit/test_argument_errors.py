"""Wrong arguments are refused with the name of the argument, what it should be, and what it was."""

from __future__ import annotations

import asyncio
import re

import pytest
from fake_verbs import opened
from kit import linux_only as linux_only

import ndpy
from ndpy.objects.resource import Resource

MADE = [
    thing
    for thing in vars(ndpy).values()
    if isinstance(thing, type) and issubclass(thing, Resource) and getattr(thing, "__abstractmethods__", ())
]


adapter = opened(windows=1)


# ---- objects that others make ----


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
@pytest.mark.parametrize("arguments", [(), ("soft0",)])
def test_a_class_that_is_called_says_what_makes_its_objects(made, arguments):
    with pytest.raises(TypeError, match=f"^{made.__name__} objects are made by ") as caught:
        made(*arguments)
    maker = re.search(r"made by (?:ndpy\.)?((?:\w+\.)?\w+)\(", str(caught.value))[1]
    owner, _, name = maker.rpartition(".")
    assert callable(getattr(getattr(ndpy, owner) if owner else ndpy, name))


# ---- arguments ----


def test_a_number_in_the_place_of_a_queue_is_named(adapter, queue):
    with pytest.raises(TypeError, match="the receive completion queue is an object that this adapter has made, not 16"):
        adapter.create_queue_pair(16)
    with pytest.raises(TypeError, match=r"the initiator completion queue is .* not 16"):
        adapter.create_queue_pair(queue, 16)


def test_a_queue_pair_of_another_kind_is_named(adapter, queue):
    with pytest.raises(TypeError, match=r"type is a QueuePairType, such as QueuePairType\.UC, not 'UC'"):
        adapter.create_queue_pair(queue, type="UC")


@pytest.mark.parametrize("register", ["register", "begin_register"])
@pytest.mark.parametrize("access", ["rw", "1", 1.0, None])
def test_rights_that_are_no_flags_are_told_what_flags_are(adapter, register, access):
    with pytest.raises(TypeError, match=r"access is a combination of Access flags, such as .*, not") as caught:
        getattr(adapter, register)(bytearray(8), access)
    assert repr(access) in str(caught.value)


@pytest.mark.parametrize("depth", ["8", 8.0, None, []])
def test_a_depth_that_is_no_integer_is_named(adapter, depth):
    with pytest.raises(TypeError, match="a completion queue's depth is an integer, not") as caught:
        adapter.create_completion_queue(depth)
    assert repr(depth) in str(caught.value)


def test_limits_of_a_queue_pair_that_are_no_integers_are_named(adapter, queue):
    with pytest.raises(TypeError, match="receive_queue_depth is an integer, not '64'"):
        adapter.create_queue_pair(queue, receive_queue_depth="64")


@pytest.mark.parametrize("which", [5, b"soft0", ["soft0"]])
def test_an_adapter_is_named_by_a_string(which):
    with pytest.raises(
        TypeError, match="an adapter is named by a string, its name or a local IP address, not"
    ) as caught:
        ndpy.open_adapter(which)
    assert repr(which) in str(caught.value)


def test_memory_of_no_number_of_bytes_is_named():
    with pytest.raises(TypeError, match="length is an integer, not '4096'"):
        ndpy.alloc("4096")
    with pytest.raises(TypeError, match=r"alignment is an integer, not 0\.5"):
        ndpy.alloc(4096, alignment=0.5)


def test_a_cache_of_no_integers_or_of_no_adapter_says_so(adapter):
    with pytest.raises(TypeError, match="max_bytes is an integer, not '1G'"):
        ndpy.RegistrationCache(adapter, max_bytes="1G", max_entries=8)
    with pytest.raises(TypeError, match="adapter is an open Adapter, not 'fake0'"):
        ndpy.RegistrationCache("fake0", max_bytes=1, max_entries=8)
    with pytest.raises(ndpy.LimitExceededError, match="not max_bytes=4096 and max_entries=0"):
        ndpy.RegistrationCache(adapter, max_bytes=4096, max_entries=0)


def test_a_backlog_and_limits_of_connections_that_are_no_integers_are_named(adapter):
    with pytest.raises(TypeError, match="backlog is an integer, not '5'"):
        adapter.listen(("127.0.0.1", 0), backlog="5")
    with pytest.raises(TypeError, match="slots is an integer, not None"):
        asyncio.run(connect_with(adapter, slots=None))


async def connect_with(adapter, **limits):
    await ndpy.aio.connect(("127.0.0.1", 7471), adapter=adapter, **limits)


@pytest.mark.parametrize("post", ["send", "receive"])
def test_what_cannot_be_posted_is_told_what_can_be(queue_pair, post):
    with pytest.raises(TypeError, match="a region, a slice of one, or a sequence of these, not int"):
        getattr(queue_pair, post)(10)


# ---- waits in vain ----


def waits(queue):
    """All ways to wait for a queue."""
    poller = ndpy.Poller()
    poller.add(queue)
    return {
        "wait()": lambda timeout_s: queue.wait(timeout_s),
        "wait_async()": lambda timeout_s: asyncio.run(queue.wait_async(timeout_s)),
        "Poller.wait()": lambda timeout_s: poller.wait(timeout_s),
    }


@pytest.mark.parametrize("way", ["wait()", "wait_async()", "Poller.wait()"])
@pytest.mark.parametrize("timeout_s", [0, 0.01])
def test_a_wait_in_vain_says_how_long_and_that_nothing_is_outstanding(queue, queue_pair, way, timeout_s):
    with pytest.raises(ndpy.TimeoutError) as caught:
        waits(queue)[way](timeout_s)
    assert str(caught.value) == (
        f"wait: no completion within {timeout_s:g} s; nothing is outstanding, so nothing will come until something is "
        f"posted (ndpy explain no-completion)"
    )


@pytest.mark.parametrize("way", ["wait()", "wait_async()", "Poller.wait()"])
def test_a_wait_in_vain_says_what_is_outstanding(adapter, queue, queue_pair, way):
    for _ in range(3):
        queue_pair.receive([])
    with pytest.raises(
        ndpy.TimeoutError, match=r"within 0\.01 s; outstanding are 0 requests of this side and 3 receives"
    ):
        waits(queue)[way](0.01)


def test_what_completes_in_another_queue_is_not_counted(adapter, queue):
    with (
        adapter.create_completion_queue(8) as other,
        adapter.create_queue_pair(queue, other) as queue_pair,
        adapter.create_queue_pair(other),
    ):
        queue_pair.receive([])
        with pytest.raises(ndpy.TimeoutError, match="nothing is outstanding"):
            other.wait(0)
        with pytest.raises(ndpy.TimeoutError, match="0 requests of this side and 1 receives"):
            queue.wait(0)
