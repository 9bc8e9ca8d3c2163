"""What a request refers to: every way of posting refuses closed and foreign objects, and tokens that the provider would
cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kit import linux_only as linux_only
from kit.deadlines import DEADLINE_S
from shared_queues import PlayedSharedQueue

import ndpy
from ndpy import Access, Batch, Flags
from ndpy.platforms.verbs.native_calls import ffi

REMOTE = ndpy.RemoteMemory(0x90000, 256, 9)
SIZES: Any = {"max_initiator_sge": 3, "max_receive_sge": 3, "inline_data_size": 64}
RIGHTS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE


class SharedQueue(PlayedSharedQueue):
    """A shared receive queue without a provider."""

    def _native_create(self):
        return ffi.NULL

    def _native_destroy(self):
        pass


class Ends:
    """Two open adapters of one device, with a queue pair of each kind on the first one."""

    def __init__(self, fake: Any, opened: ExitStack, windows: int = 2) -> None:
        fake.have_address()
        self.fake = fake
        self.adapter, self.other = (opened.enter_context(fake.open(windows=windows)) for _ in range(2))
        self.queue = opened.enter_context(self.adapter.create_completion_queue(64))
        self.queue_pair = opened.enter_context(self.adapter.create_queue_pair(self.queue, **SIZES))
        self.queue_pair._begin_connection()
        self.datagrams = opened.enter_context(self.adapter.create_datagram_queue_pair(self.queue, **SIZES))
        self.shared = opened.enter_context(SharedQueue(self.adapter, 4, 2, 0))
        self.region = opened.enter_context(self.adapter.register(bytearray(64), RIGHTS))
        self.window = opened.enter_context(self.adapter.create_memory_window())
        self.opened = opened

    def destination(self) -> Any:
        return self.opened.enter_context(self.datagrams.resolve(("127.0.0.1", 4000), timeout_s=DEADLINE_S))

    def foreign_region(self) -> ndpy.MemoryRegion:
        return self.opened.enter_context(self.other.register(bytearray(64), RIGHTS))

    def closed_region(self) -> ndpy.MemoryRegion:
        region = self.adapter.register(bytearray(64), RIGHTS)
        region.close()
        return region

    def batch(self, fill: str, *arguments: Any, **options: Any) -> Batch:
        made = Batch(2, max_sge=2)
        for _ in range(2):
            getattr(made, fill)(*arguments, **options)
        return made

    def nothing_is_posted(self) -> bool:
        records = [
            record
            for queue_pair in (self.queue_pair, self.datagrams)
            for record in (queue_pair._posted_requests.initiator, queue_pair._posted_requests.receive)
        ]
        return not any(map(len, records)) and not self.shared._records


@pytest.fixture
def ends(fake) -> Iterator[Ends]:
    with ExitStack() as opened:
        yield Ends(fake, opened)


Post = Callable[[Ends, Any], Any]

#: Every way in which memory of this side is posted.
WAYS: dict[str, Post] = {
    "an element": lambda ends, sge: ends.queue_pair.send(sge),
    "elements": lambda ends, sge: ends.queue_pair.write([ends.region[:8], sge], REMOTE),
    "inline": lambda ends, sge: ends.queue_pair.send([b"data", sge], flags=Flags.INLINE),
    "with immediate data": lambda ends, sge: ends.queue_pair.write(sge, REMOTE, immediate=5),
    "and invalidate": lambda ends, sge: ends.queue_pair.send_and_invalidate(sge, REMOTE),
    "read": lambda ends, sge: ends.queue_pair.read(sge, REMOTE),
    "receive": lambda ends, sge: ends.queue_pair.receive(sge),
    "receive elements": lambda ends, sge: ends.queue_pair.receive([sge]),
    "receive many": lambda ends, sge: ends.queue_pair.receive_many([ends.region[:8], sge]),
    "a batch": lambda ends, sge: ends.queue_pair.post(ends.batch("write", [ends.region[:8], sge], REMOTE)),
    "a batch of receives": lambda ends, sge: ends.queue_pair.post(ends.batch("receive", sge)),
    "one by one": lambda ends, sge: ends.queue_pair._post_singly(ends.batch("send", sge), 0),
    "a shared receive queue": lambda ends, sge: ends.shared.receive([ends.region[:8], sge]),
    "a datagram": lambda ends, sge: ends.datagrams.send(sge, ends.destination()),
    "a batch of datagrams": lambda ends, sge: ends.datagrams.post(ends.batch("send_to", sge, ends.destination())),
}
#: Those that take a region and no slice of it.
OF_REGIONS: dict[str, Post] = {
    "bind": lambda ends, region: ends.queue_pair.bind(ends.window, region, Access.REMOTE_READ),
}


@pytest.mark.parametrize("state", ["closed", "foreign"])
@pytest.mark.parametrize("way", [*WAYS, *OF_REGIONS])
def test_no_request_refers_to_a_region_that_is_closed_or_foreign(ends, way, state):
    region = getattr(ends, f"{state}_region")()
    error = ndpy.ClosedError if state == "closed" else ndpy.ForeignObjectError
    if way in WAYS:
        for sge in (region, region[:8]):
            with pytest.raises(error, match=r"(?i)region"):
                WAYS[way](ends, sge)
    else:
        with pytest.raises(error, match=r"(?i)region"):
            OF_REGIONS[way](ends, region)
    assert ends.nothing_is_posted()


@pytest.mark.parametrize("way", WAYS)
def test_no_token_is_cut(ends, way):
    token = ends.region.local_token + (1 << 32)
    with pytest.raises(ValueError, match=rf"token of this adapter is 0 to 2\*\*32-1, not {token:#x}"):
        WAYS[way](ends, ndpy.Sge(ends.region, ends.region.address, 8, token))
    assert ends.nothing_is_posted()


@pytest.mark.parametrize("way", ["write", "read", "send_and_invalidate"])
@pytest.mark.parametrize("batched", [False, True])
def test_no_token_of_the_peer_is_cut(fake, way, batched):
    with ExitStack() as opened:
        # A device with windows of type 2 can invalidate those of its peers.
        ends = Ends(fake, opened, windows=1)
        taker = Batch(1) if batched else ends.queue_pair
        with pytest.raises(ValueError, match=r"remote token is 0 to 2\*\*32-1"):
            getattr(taker, way)(ends.region[:8], ndpy.RemoteMemory(0x90000, 8, 1 << 32))
        assert ends.nothing_is_posted()


SENDS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "send": lambda queue_pair, sge, there: queue_pair.send(sge, there),
    "send elements": lambda queue_pair, sge, there: queue_pair.send([sge], there),
    "inline": lambda queue_pair, sge, there: queue_pair.send(b"abc", there, flags=Flags.INLINE),
    "immediate": lambda queue_pair, sge, there: queue_pair.send(sge, there, immediate=3),
}


@pytest.mark.parametrize("state", ["closed", "foreign"])
@pytest.mark.parametrize("way", [*SENDS, "a batch", "a batch again", "one by one"])
def test_no_request_refers_to_a_destination_that_is_closed_or_foreign(ends, way, state):
    region = ends.region
    there = ends.destination()
    batch = Batch(2)
    batch.send_to(region[:8], there)
    if way == "a batch again":
        ends.datagrams.post(batch)
    if state == "foreign":
        queue = ends.opened.enter_context(ends.other.create_completion_queue(8))
        sender = ends.opened.enter_context(ends.other.create_datagram_queue_pair(queue))
        region = ends.foreign_region()
        batch.clear()
        batch.send_to(region[:8], there)
    else:
        sender = ends.datagrams
        there.close()
    posted = len(ends.datagrams._posted_requests.initiator)
    with pytest.raises(ndpy.ClosedError if state == "closed" else ndpy.ForeignObjectError, match=r"(?i)destination"):
        if way in SENDS:
            SENDS[way](sender, region[:8], there)
        elif way == "one by one":
            sender._post_singly(batch, 0)
        else:
            sender.post(batch)
    assert len(sender._posted_requests.initiator) == (posted if sender is ends.datagrams else 0)
    if state == "closed":
        # The same request to another one.
        batch.clear()
        batch.send_to(region[:8], ends.destination())
        sender.post(batch)


def test_nothing_is_posted_to_a_destination_that_is_being_destroyed(ends, monkeypatch):
    there, refused = ends.destination(), []
    batch = Batch(1)
    batch.send_to(ends.region[:8], there)
    destroy = there._native_destroy

    def post_and_destroy() -> None:
        for post in (lambda: ends.datagrams.send(ends.region[:8], there), lambda: ends.datagrams.post(batch)):
            with pytest.raises(ndpy.ClosedError) as caught:
                post()
            refused.append(caught.value)
        destroy()

    monkeypatch.setattr(there, "_native_destroy", post_and_destroy)
    there.close()
    assert len(refused) == 2
    assert ends.nothing_is_posted()


def test_a_destination_whose_close_failed_can_be_used(ends, monkeypatch):
    there = ends.destination()

    def fail() -> None:
        raise ndpy.ProviderError("no", operation="close destination")

    with monkeypatch.context() as changed:
        changed.setattr(there, "_native_destroy", fail)
        with pytest.raises(ndpy.ProviderError):
            there.close()
    ends.datagrams.send(ends.region[:8], there)
    assert len(ends.datagrams._posted_requests.initiator) == 1


def test_a_batch_refuses_a_region_that_has_moved_to_another_domain(ends):
    batch = ends.batch("send", ends.region[:8])
    ends.queue_pair.post(batch)
    posted = len(ends.queue_pair._posted_requests.initiator)
    own, ends.region._adapter = ends.region._adapter, ends.other
    with pytest.raises(ndpy.ForeignObjectError):
        ends.queue_pair.post(batch)
    ends.region._adapter = own
    assert len(ends.queue_pair._posted_requests.initiator) == posted
