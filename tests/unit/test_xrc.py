"""XRC against a device that has it, which none of Linux's software adapters does. The stand-in moves the bytes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from kit import linux_only as linux_only

import ndpy
from ndpy import Access, Batch, Capability, CompletionArray, Flags, Operation, QueuePairType, Status, XrcDestination
from ndpy.platforms.verbs import queue_pair as queue_pairs
from ndpy.vocabulary.endpoint import Endpoint
from ndpy.vocabulary.queue_pair_attributes import AddressVector, QueuePairState

GID = bytes(range(16))


class Host:
    """Everything of two connected ends: the domain with a receiver, a shared queue, and a sender."""

    def __init__(self, fake, adapter, keep):
        self.fake = fake
        self.adapter = adapter
        self.receive_cq, self.initiator_cq = (
            keep(adapter.create_completion_queue(32)),
            keep(adapter.create_completion_queue(32)),
        )
        self.domain = keep(adapter.open_xrc_domain())
        self.queue = keep(self.domain.create_shared_receive_queue(self.receive_cq, 8))
        self.receiver = keep(self.domain.create_receiver())
        self.sender = keep(adapter.create_xrc_sender(self.initiator_cq, initiator_queue_depth=8, inline_data_size=64))
        self.region = keep(adapter.register(bytearray(256), Access.REMOTE_WRITE | Access.LOCAL_WRITE))
        self.connect()

    def connect(self):
        ends = [end.local_endpoint() for end in (self.sender, self.receiver)]
        self.sender.connect_endpoint(ends[1])
        self.receiver.connect_endpoint(ends[0])

    def deliver(self):
        assert self.fake.deliver(self.sender, self.receiver._number)

    @property
    def destination(self):
        return XrcDestination(self.queue.number)


@pytest.fixture
def keep():
    kept = []

    def note(thing):
        kept.append(thing)
        return thing

    yield note
    for thing in reversed(kept):
        thing.close()


@pytest.fixture
def adapter(fake, keep, monkeypatch):
    def local_endpoint_of(adapter, number, gid_index, psn):
        return Endpoint(0, number, 7, GID, mtu=1024, gid_type="RoCE v2")

    monkeypatch.setattr(queue_pairs, "local_endpoint_of", local_endpoint_of)
    fake.xrc.value = 1
    return keep(fake.open())


@pytest.fixture
def host(fake, adapter, keep):
    return Host(fake, adapter, keep)


def test_who_has_it_claims_it(fake, adapter):
    assert Capability.XRC in adapter.info.capabilities
    fake.xrc.value = 0
    with fake.open() as other:
        assert Capability.XRC not in other.info.capabilities
        with ndpy.CompletionQueue.__enter__(other.create_completion_queue(1)) as cq:
            for use in (other.open_xrc_domain, lambda: other.create_xrc_sender(cq)):
                with pytest.raises(ndpy.UnsupportedError, match="XRC"):
                    use()


@pytest.mark.parametrize("immediate", [None, 0, 0xFFFFFFFF])
@pytest.mark.parametrize("inline", [False, True])
def test_a_message_comes_to_the_queue_that_it_names(host, keep, immediate, inline):
    other_cq = keep(host.adapter.create_completion_queue(8))
    other = keep(host.domain.create_shared_receive_queue(other_cq, 8))
    for place, queue in enumerate((host.queue, other)):
        queue.receive(host.region[64 * place : 64 * place + 64], context=place)
    host.region.buffer[128:136] = b"to other"
    host.sender.send_to(
        host.region[128:136],
        XrcDestination(other.number),
        context=5,
        flags=Flags.INLINE if inline else 0,
        immediate=immediate,
    )
    host.deliver()
    [sent] = host.initiator_cq.poll()
    assert (sent.context, sent.operation, sent.status, sent.queue_pair) == (
        5,
        Operation.SEND,
        Status.SUCCESS,
        host.sender,
    )
    assert host.receive_cq.poll() == []
    [received] = other_cq.poll()
    assert (received.context, received.operation, received.nbytes) == (1, Operation.RECEIVE, 8)
    assert received.immediate == immediate
    assert received.queue_pair is host.receiver
    assert bytes(host.region.buffer[64:72]) == b"to other"


def test_the_example_of_the_docs(fake, adapter, keep, tmp_path):
    document = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8")
    [program] = [block.split("```")[0] for block in document.split("```python\n")[1:] if "open_xrc_domain" in block]
    region = keep(adapter.register(bytearray(b"12345678" + bytes(8))))
    names = {
        "ndpy": ndpy,
        "adapter": adapter,
        "path": tmp_path / "domain",
        "queue": keep(adapter.create_completion_queue(8)),
        "sender_queue": keep(adapter.create_completion_queue(8)),
        "source": region[0:8],
        "inbox": region[8:16],
    }
    exec(compile(program, "docs/verbs.md", "exec"), names)
    for name in ("domain", "inboxes", "receiver", "sender"):
        keep(names[name])
    assert fake.deliver(names["sender"], names["receiver"]._number)
    [received] = names["queue"].poll()
    assert (received.nbytes, bytes(region.buffer[8:])) == (8, b"12345678")


def test_a_write_brings_immediate_data_to_a_queue(host):
    host.queue.receive(host.region[0:8], context=3)
    host.region.buffer[128:132] = b"data"
    remote = host.region.remote(200, 4)
    host.sender.write_to(host.region[128:132], remote, host.destination, 77, context=4)
    host.sender.write(host.region[128:130], remote, context=6)
    host.deliver()
    host.deliver()
    assert [(done.context, done.operation) for done in host.initiator_cq.poll()] == [
        (4, Operation.WRITE),
        (6, Operation.WRITE),
    ]
    [received] = host.receive_cq.poll()
    assert (received.context, received.immediate, received.nbytes) == (3, 77, 4)
    assert received.operation is Operation.RECEIVE_RDMA_WITH_IMMEDIATE
    assert bytes(host.region.buffer[200:204]) == b"data"


def test_batches_and_completion_arrays_do_the_same(host, keep):
    other = keep(host.domain.create_shared_receive_queue(host.receive_cq, 8))
    queues = [host.queue, other, host.queue]
    for place, queue in enumerate(queues):
        queue.receive(host.region[16 * place : 16 * place + 16], context=place)
    batch = Batch(4, signal_all=True)
    for place, queue in enumerate(queues):
        host.region.buffer[128 + place] = place + 1
        element = host.region[128 + place : 129 + place]
        if place == 1:
            batch.write_to(element, host.region.remote(250, 1), XrcDestination(queue.number), 9, context=place)
        else:
            batch.send_to(element, XrcDestination(queue.number), context=place, immediate=place)
    for _ in range(3):
        host.sender.post(batch)
        for _ in queues:
            host.deliver()
        array = CompletionArray(8)
        assert host.initiator_cq.poll_into(array) == 3
        assert list(array.contexts[:3]) == [0, 1, 2]
        assert host.receive_cq.poll_into(array) == 3
        assert sorted(array.contexts[:3]) == [0, 1, 2]
        assert list(array.statuses[:3]) == [Status.SUCCESS] * 3
        assert host.region.buffer[0] == 1
        assert host.region.buffer[32] == 3
        assert host.region.buffer[250] == 2
        for place, queue in enumerate(queues):
            queue.receive(host.region[16 * place : 16 * place + 16], context=place)


def test_a_destination_is_kept_and_checked(host):
    for number in (-1, 1 << 24, 1.0, None):
        with pytest.raises(ValueError, match="0 to 16777215"):
            XrcDestination(number)
    assert repr(XrcDestination(0x800001)) == "XrcDestination(0x800001)"
    with pytest.raises(TypeError, match="XrcDestination"):
        host.sender.send_to(host.region[0:1], host.queue.number)
    for immediate, error in ((-1, ValueError), (1 << 32, ValueError), ("1", TypeError)):
        with pytest.raises(error, match="immediate"):
            host.sender.write_to(host.region[0:1], host.region.remote(0, 1), host.destination, immediate)


def test_what_an_end_does_not_do_is_refused(host):
    element, remote = host.region[0:8], host.region.remote(0, 8)
    with pytest.raises(ndpy.UnsupportedError, match="send_to"):
        host.sender.send(element)
    with pytest.raises(ndpy.UnsupportedError, match="write_to"):
        host.sender.write(element, remote, immediate=1)
    with pytest.raises(ndpy.UnsupportedError, match="receives nothing"):
        host.sender.receive(element)
    with pytest.raises(ndpy.UnsupportedError, match="receives nothing"):
        host.sender.receive_many([element])
    for add in (lambda batch: batch.send(element), lambda batch: batch.write(element, remote, immediate=1)):
        batch = Batch(1)
        add(batch)
        with pytest.raises(ndpy.UnsupportedError):
            host.sender.post(batch)
    receives = Batch(1)
    receives.receive(element)
    with pytest.raises(ndpy.UnsupportedError, match="receives nothing"):
        host.sender.post(receives)
    receiver = host.receiver
    uses = [
        lambda: receiver.send(element),
        lambda: receiver.receive(element),
        lambda: receiver.read(element, remote),
        lambda: receiver.read(element, None),
        lambda: receiver.fetch_and_add(element),
        lambda: receiver.write(element, remote),
        lambda: receiver.compare_and_swap(element, remote, 0, 1),
        lambda: receiver.fetch_and_add(element, remote, 1),
        lambda: receiver.atomic_write(remote, 1),
        lambda: receiver.flush_memory(remote),
        lambda: receiver.send_and_invalidate(element, remote),
        lambda: receiver.receive_many([element]),
        lambda: receiver.post(receives),
        lambda: receiver.bind(None, element),
        lambda: receiver.invalidate(None),
    ]
    for use in uses:
        with pytest.raises(ndpy.UnsupportedError, match="posts no requests"):
            use()


def test_flags_are_those_of_a_send(host):
    flags = Flags.SILENT_SUCCESS | Flags.READ_FENCE | Flags.SOLICITED
    for context in range(2):
        host.queue.receive(host.region[0:8])
        host.sender.send_to(host.region[8:16], host.destination, context=context, flags=flags if not context else 0)
        host.deliver()
    assert [done.context for done in host.initiator_cq.poll()] == [1]
    for post in (
        lambda: host.sender.send_to(host.region[0:8], host.destination, flags=0x40),
        lambda: host.sender.write_to(host.region[0:8], host.region.remote(0, 8), host.destination, 1, flags=0x40),
    ):
        with pytest.raises(ndpy.InvalidFlagsError, match="READ_FENCE"):
            post()


def test_a_connected_rc_queue_pair_sends_to_no_destination(host, keep):
    queue_pair = keep(host.adapter.create_queue_pair(host.initiator_cq))
    batch = Batch(1)
    batch.send_to(host.region[0:1], host.destination)
    with pytest.raises(ndpy.UnsupportedError):
        queue_pair.post(batch)


def test_a_destination_of_the_other_kind_is_refused(host, keep):
    datagrams = keep(host.adapter.create_datagram_queue_pair(host.initiator_cq))
    there = keep(datagrams.destination(AddressVector(gid=GID), qp_number=1))
    for queue_pair, destination in ((datagrams, host.destination), (host.sender, there)):
        batch = Batch(1)
        batch.send_to(host.region[0:1], destination)
        with pytest.raises(ndpy.UnsupportedError):
            queue_pair.post(batch)
    assert host.initiator_cq.poll() == []


def test_the_other_calls_point_to_these(host):
    cq = host.receive_cq
    for kind, call in (
        (QueuePairType.XRC_SEND, "create_xrc_sender"),
        (QueuePairType.XRC_RECV, "create_receiver"),
        (QueuePairType.UD, "create_datagram_queue_pair"),
    ):
        with pytest.raises(ValueError, match=call):
            host.adapter.create_queue_pair(cq, type=kind)
    with pytest.raises(ValueError, match="XrcReceiveQueue"):
        host.adapter.create_queue_pair(cq, srq=host.queue)


def test_by_hand_each_end_takes_what_its_state_needs(adapter, keep):
    cq = keep(adapter.create_completion_queue(8))
    domain = keep(adapter.open_xrc_domain())
    path = AddressVector(gid=GID)
    both = {"path": path, "path_mtu": 1024, "remote_number": 3, "receive_psn": 1}
    sender = keep(adapter.create_xrc_sender(cq))
    with pytest.raises(ndpy.QueuePairAttributesError, match="does not take inbound_read_limit, min_rnr_timer"):
        sender.modify(state=QueuePairState.RTR, **both, inbound_read_limit=1, min_rnr_timer=12)
    sender.modify(state=QueuePairState.RTR, **both)
    with pytest.raises(ndpy.QueuePairAttributesError, match="missing: outbound_read_limit, ack_timeout, retry_count"):
        sender.modify(state=QueuePairState.RTS, send_psn=1)
    sender.modify(
        state=QueuePairState.RTS, send_psn=1, outbound_read_limit=1, ack_timeout=14, retry_count=7, rnr_retry_count=7
    )
    receiver = keep(domain.create_receiver())
    with pytest.raises(ndpy.QueuePairAttributesError, match="missing: inbound_read_limit, min_rnr_timer"):
        receiver.modify(state=QueuePairState.RTR, **both)
    receiver.modify(state=QueuePairState.RTR, **both, inbound_read_limit=1, min_rnr_timer=12)
    receiver.modify(state=QueuePairState.RTS, send_psn=1, ack_timeout=14)


def test_each_end_tells_the_attributes_that_its_type_has(host):
    sender, receiver = host.sender.query(), host.receiver.query()
    assert sender.state is host.sender._native_state()
    assert sender.retry_count is not None
    assert sender.inbound_read_limit is None
    assert receiver.inbound_read_limit is not None
    assert receiver.retry_count is None


def test_processes_that_open_one_file_share_a_domain(fake, adapter, keep, tmp_path):
    """Here two domains of one process. The receiver is in one of them and the queue in the other."""
    cq = keep(adapter.create_completion_queue(8))
    one, other = (keep(adapter.open_xrc_domain(tmp_path / "domain")) for _ in range(2))
    assert one.path == str(tmp_path / "domain")
    sender, receiver = keep(adapter.create_xrc_sender(cq)), keep(one.create_receiver())
    queue = keep(other.create_shared_receive_queue(cq, 2))
    ends = [end.local_endpoint() for end in (sender, receiver)]
    sender.connect_endpoint(ends[1])
    receiver.connect_endpoint(ends[0])
    region = keep(adapter.register(bytearray(b"12345678" + bytes(8))))
    queue.receive(region[8:16])
    sender.send_to(region[0:8], XrcDestination(queue.number))
    assert fake.deliver(sender, receiver._number)
    completions = cq.poll()
    assert [done.ok for done in completions] == [True, True]
    # The receiver may be another process's.
    assert {done.queue_pair for done in completions} == {sender, None}
    assert bytes(region.buffer[8:]) == b"12345678"


def test_a_file_that_cannot_be_opened_is_an_error(adapter, tmp_path):
    with pytest.raises(ndpy.NdpyError, match="No such file"):
        adapter.open_xrc_domain(tmp_path / "absent/domain")


def test_a_failed_receive_names_its_receiver(host):
    host.queue.receive(host.region[0:4], context=1)
    host.sender.send_to(host.region[0:8], host.destination)
    host.deliver()
    [failed] = host.receive_cq.poll()
    assert (failed.context, failed.status, failed.queue_pair) == (1, Status.BUFFER_OVERFLOW, host.receiver)
    with pytest.raises(ndpy.NdpyError):
        failed.raise_for_status()


def test_a_receive_keeps_its_memory_and_gives_its_slot_back(host):
    for turn in range(3):
        for _ in range(8):
            host.queue.receive(host.region[0:8])
        with pytest.raises(ndpy.QueueFullError):
            host.queue.receive(host.region[0:8])
        for place in range(8):
            host.sender.send_to(host.region[8:16], host.destination, context=place)
            host.deliver()
        assert len(host.receive_cq.poll()) == 8
        assert len(host.initiator_cq.poll()) == 8, turn


def test_members_are_closed_before_their_domain(host):
    with pytest.raises(ndpy.DeviceBusyError, match=r"XrcDomain is in use by.*XrcReceive"):
        host.domain.close()
    with pytest.raises(ndpy.DeviceBusyError):
        host.receive_cq.close()
    host.receiver.close()
    with pytest.raises(ndpy.DeviceBusyError, match="XrcReceiveQueue 0x"):
        host.domain.close()
    host.queue.close()
    host.domain.close()
    host.receive_cq.close()
    with pytest.raises(ndpy.ClosedError):
        host.domain.create_receiver()


def test_completions_outlive_their_queue_and_receiver(host):
    """close() of the shared queue takes them from the provider, because its memory goes."""
    host.queue.receive(host.region[0:8], context=1)
    host.queue.receive(host.region[0:8], context=2)
    for _ in range(2):
        host.sender.send_to(host.region[8:16], host.destination)
        host.deliver()
    host.receiver.close()
    host.queue.close()
    first, second = host.receive_cq.poll()
    assert [(done.context, done.ok, done.queue_pair) for done in (first, second)] == [(1, True, None), (2, True, None)]


def test_dropped_objects_are_closed(fake, adapter):
    cq = adapter.create_completion_queue(8)
    with pytest.warns(ResourceWarning):
        domain = adapter.open_xrc_domain()
        members = [
            domain.create_receiver(),
            domain.create_shared_receive_queue(cq, 8),
            adapter.create_xrc_sender(cq),
        ]
        del members, domain, cq
        gc.collect()


def test_the_end_of_a_connection_cancels_what_is_left(host):
    host.sender.send_to(host.region[0:8], host.destination, context=1)
    host.sender.flush()
    [left] = host.initiator_cq.poll()
    assert (left.context, left.status) == (1, Status.CANCELED)
    host.receiver.flush()


def test_retries_are_those_of_the_sender(host):
    assert host.sender.read_limits.inbound == 0
    assert host.receiver.read_limits.outbound == 0
    with pytest.raises(ndpy.ConnectionActiveError):
        host.sender.connect_endpoint(host.receiver.local_endpoint())
