"""Datagrams in the core: headers of receives, what their completions bring, and destinations of batches."""

from __future__ import annotations

import ctypes
import gc
import struct
import weakref

import pytest
from data_path_provider import FLUSHED, INLINE_SIZE, WC_GRH, WC_RECV, WC_SEND, WR_SEND, WR_SEND_WITH_IMM
from kit.helpers import interrupted
from posting_ends import Queue, Queues, Region, in_flight

import ndpy
from ndpy import Batch, CompletionArray, DatagramSource, Flags
from ndpy.platforms.verbs.native_calls import ffi, lib

HEADER, TOKEN = 40, 0x77
DEPTH = 8
RECEIVES = DEPTH + 1


class Handle:
    """In place of a Destination."""

    length = 0

    def __init__(self, address=0x123456789A, number=5, qkey=0x80010000):
        self._words = (address, number | qkey << 32)


class Datagrams(Queues):
    """The posting half of a queue pair for datagrams."""

    def __init__(self, provider):
        super().__init__(provider)
        self.type = ndpy.QueuePairType.UD
        self.headers = ctypes.create_string_buffer(RECEIVES * HEADER)
        self.base = ctypes.addressof(self.headers)
        lib.ndpy_queue_pair_take_headers(self._rings, ffi.cast("void *", self.base), TOKEN)
        lib.ndpy_queue_pair_offer(self._rings, self._offered())

    def _offered(self):
        return 1 << lib.NDPY_RECEIVE | 1 << lib.NDPY_SEND_TO | 1 << lib.NDPY_SEND_TO_WITH_IMMEDIATE

    def header(self, place):
        return self.base + place * HEADER

    def fill(self, place, data):
        ctypes.memmove(self.header(place), data.ljust(HEADER, b"\0"), HEADER)


@pytest.fixture
def queues(provider):
    queues = Datagrams(provider)
    yield queues
    queues._detach()


def arrive(provider, nbytes, flags=WC_GRH, key=0):
    """The last posted receive gets a datagram."""
    provider.complete(opcode=WC_RECV, nbytes=nbytes + HEADER, flags=flags, key=key)


def test_each_receive_has_an_element_for_its_header(provider, queues):
    region = Region()
    for place in range(3):
        queues.receive(region[place : place + 8], context=place)
        sent = provider.sent
        assert (sent.elements, sent.address, sent.length, sent.key) == (2, queues.header(place), HEADER, TOKEN)
    queues.receive([])
    assert (provider.sent.elements, provider.sent.address) == (1, queues.header(3))


def test_a_completion_brings_its_header_and_its_own_context(provider, queues, cq):
    region = Region()
    for place in range(20):
        queues.receive(region[:8], context=100 + place)
        header = bytes([0x60, place, *range(38)])
        queues.fill(_index_of(provider, queues), header)
        arrive(provider, 5)
        (completion,) = cq.poll()
        assert (completion.context, completion.nbytes, completion.ok) == (100 + place, 5, True)
        assert completion.source.header == header
        assert in_flight(queues, 1) == 0


def _index_of(provider, queues):
    return (provider.sent.address - queues.base) // HEADER


def test_a_datagram_without_a_header_says_so(provider, queues, cq):
    queues.receive(Region()[:8])
    arrive(provider, 8, flags=0)
    (completion,) = cq.poll()
    assert completion.source.header is None
    assert (completion.source.gid, completion.source.local_gid, completion.source.gid_type) == (None, None, "")
    assert (completion.source.traffic_class, completion.source.flow_label, completion.source.hop_limit) == (0, 0, 0)


def test_a_header_outlives_the_next_receive_of_its_slot(provider, queues, cq):
    """The completion waits in the queue's own memory, while the slot is used again."""
    region = Region()
    for turn in range(3):
        queues.receive(region[:8], context=turn)
        queues.fill(_index_of(provider, queues), bytes([turn]))
        arrive(provider, 1)
        assert lib.ndpy_drain(provider.cq) == 1
    assert [(found.context, found.source.header[0]) for found in cq.poll()] == [(0, 0), (1, 1), (2, 2)]


def test_a_failed_receive_brings_nothing(provider, queues, cq):
    queues.receive(Region()[:8], context=6)
    provider.complete(opcode=WC_RECV, status=FLUSHED)
    (completion,) = cq.poll()
    assert (completion.context, completion.status, completion.source) == (6, ndpy.Status.CANCELED, None)


def test_an_array_keeps_the_sources(provider, queues, cq):
    region, array = Region(), CompletionArray(4)
    for turn in range(2):
        for place in range(3):
            queues.receive(region[:8], context=place)
            queues.fill(_index_of(provider, queues), bytes([turn, place]))
            arrive(provider, place)
        assert cq.poll_into(array) == 3
        assert list(array.contexts) == [0, 1, 2]
        assert list(array.nbytes) == [0, 1, 2]
        assert [completion.source.header[:2] for completion in array] == [bytes([turn, place]) for place in range(3)]
    provider.complete(opcode=WC_SEND)
    cq.poll_into(array)


def test_ctrl_c_in_the_middle_loses_no_datagram(provider, queues, cq, monkeypatch):
    queues.receive(Region()[:8], context=7)
    queues.fill(0, b"here")
    arrive(provider, 4)
    # Its completions go through Python, one by one.
    queues._posted_requests.watched = True

    monkeypatch.setattr(Queue, "_collect_one", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cq.poll()
    monkeypatch.undo()
    (completion,) = cq.poll()
    assert (completion.context, completion.nbytes, completion.source.header[:4]) == (7, 4, b"here")


def test_what_nobody_takes_goes_with_the_queue(provider, queues):
    """Under sanitizers this test shows that the memory is freed once."""
    cq = lib.ndpy_completion_queue_new(provider.native("completion_queue"))
    for _ in range(3):
        queues.receive(Region()[:8])
        arrive(provider, 4)
    assert lib.ndpy_drain(cq) == 3
    lib.ndpy_completion_queue_free(cq)


def test_a_batch_of_receives_is_posted_one_by_one(provider, queues, cq):
    region, batch = Region(), Batch(3)
    for place in range(3):
        batch.receive(region[place : place + 8], context=place)
    for _ in range(2):
        queues.post(batch)
        assert provider.sent.elements == 2
    assert in_flight(queues, 1) == 6


def test_a_batch_names_destinations(provider, queues, cq):
    region, batch = Region(), Batch(2)
    there = Handle()
    batch.send_to(region[:4], there)
    batch.send_to(region[:4], there, immediate=0x01020304, context=9)
    queues.post(batch)
    first, second = provider.call()
    assert (first.opcode, second.opcode) == (WR_SEND, WR_SEND_WITH_IMM)
    provider.complete()
    (completion,) = cq.poll()
    assert (completion.context, completion.operation, completion.source) == (9, ndpy.Operation.SEND, None)


def test_a_posted_batch_keeps_its_destinations(provider, queues, cq):
    region, batch, there = Region(), Batch(1), Handle()
    alive = weakref.ref(there)
    batch.send_to(region[:4], there)
    del there
    queues.post(batch)
    batch.clear()
    gc.collect()
    assert alive() is not None
    provider.complete()
    cq.poll()
    del batch
    gc.collect()
    queues.post(_another(region))
    gc.collect()
    assert alive() is None


def _another(region):
    batch = Batch(1)
    batch.send_to(region[:4], Handle())
    return batch


def test_a_single_send_keeps_its_destination(provider, queues, cq):
    there = Handle()
    alive = weakref.ref(there)
    queues._post_many(lib.NDPY_SEND_TO, Region()[:4], 3, 0, None, (0, *there._words), there)
    del there
    assert alive() is not None
    provider.complete()
    assert [completion.context for completion in cq.poll()] == [3]
    assert alive() is None


@pytest.mark.parametrize("wrong", [None, 5, "there"])
def test_a_wrong_destination_is_refused(wrong):
    with pytest.raises(TypeError, match="a destination is a Destination, not "):
        Batch(1).send_to(Region()[:4], wrong)


def test_what_is_no_datagram_is_refused(provider, queues):
    batch = Batch(1)
    batch.send(Region()[:4])
    with pytest.raises(ndpy.UnsupportedError, match="of type UD"):
        queues.post(batch)
    batch.clear()
    batch.write(Region()[:4], ndpy.RemoteMemory(0x90000, 100, 9))
    with pytest.raises(ndpy.UnsupportedError, match="of type UD"):
        queues.post(batch)
    batch.clear()
    batch.send_to(Region()[:4], Handle(), flags=Flags.READ_FENCE)
    with pytest.raises(ndpy.InvalidFlagsError):
        queues.post(batch)
    batch.clear()
    batch.send_to(Region()[: INLINE_SIZE + 1], Handle(), flags=Flags.INLINE)
    with pytest.raises(ndpy.LimitExceededError):
        queues.post(batch)


def source(header):
    return DatagramSource(qp_number=1, header=header)


def test_headers_of_each_kind_are_read():
    sender, receiver = bytes(range(16)), bytes(range(16, 32))
    grh = struct.pack(">IHBB", 6 << 28 | 0x68 << 20 | 0x12345, 100, 17, 63) + sender + receiver
    six = source(grh)
    assert (six.gid, six.local_gid, six.gid_type) == (sender, receiver, "RoCE v2")
    assert (six.traffic_class, six.flow_label, six.hop_limit) == (0x68, 0x12345, 63)
    infiniband = source(grh[:6] + b"\x1b" + grh[7:])
    assert (infiniband.gid, infiniband.gid_type) == (sender, "")
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0x68, 100, 1, 0, 62, 17, 0, bytes([192, 0, 2, 1]), bytes([192, 0, 2, 2]))
    four = source(b"\xaa" * 20 + ip)
    assert (four.gid, four.gid_type) == (bytes(10) + b"\xff\xff" + bytes([192, 0, 2, 1]), "RoCE v2")
    assert four.local_gid == bytes(10) + b"\xff\xff" + bytes([192, 0, 2, 2])
    assert (four.traffic_class, four.flow_label, four.hop_limit) == (0x68, 0, 62)
