"""Queue pairs for datagrams: type UD."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from kit.helpers import (
    DEADLINE_S,
    assert_quiet,
    contents,
    contexts,
    memory,
    require,
    statuses,
    succeed,
    take,
    wait_until,
)

import ndpy
from ndpy import (
    Access,
    AddressVector,
    Batch,
    Capability,
    CompletionArray,
    Flags,
    Notify,
    Operation,
    QueuePairState,
    QueuePairType,
    Status,
)


class Station:
    """A queue pair for datagrams with its completion queue."""

    def __init__(self, keep, adapter, **options):
        self.adapter = adapter
        self.cq = keep(adapter.create_completion_queue(64))
        defaults = {"receive_queue_depth": 16, "initiator_queue_depth": 16}
        self.queue_pair = keep(adapter.create_datagram_queue_pair(self.cq, **{**defaults, **options}))


@pytest.fixture
def station(keep, adapter):
    """station(**options) makes one."""
    require(adapter, Capability.DATAGRAMS)
    return lambda **options: Station(keep, adapter, **options)


@pytest.fixture
def stations(station):
    return station(), station()


def destination(keep, source, sink, **options):
    return keep(source.queue_pair.destination(sink.queue_pair.local_endpoint(), **options))


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_a_datagram_arrives_without_its_header(stations, keep, adapter, length):
    source, sink = stations
    text = bytes(place % 251 for place in range(length))
    inbox = memory(keep, adapter, b"\xee" * 1001)
    sink.queue_pair.receive(inbox, context=1)
    outbox = memory(keep, adapter, text) if length else []
    source.queue_pair.send(outbox, destination(keep, source, sink), context=2)
    (sent,) = succeed(source.cq)
    (received,) = succeed(sink.cq)
    assert (sent.operation, sent.context, sent.source) == (Operation.SEND, 2, None)
    assert (received.operation, received.context, received.nbytes) == (Operation.RECEIVE, 1, length)
    assert received.queue_pair is sink.queue_pair
    assert contents(inbox) == text + b"\xee" * (1001 - length)


def test_the_source_names_the_sender(stations, keep, adapter):
    source, sink = stations
    sink.queue_pair.receive(memory(keep, adapter, 64), context=1)
    source.queue_pair.send(memory(keep, adapter, b"who am I"), destination(keep, source, sink))
    (received,) = succeed(sink.cq)
    own = source.queue_pair.local_endpoint()
    found = received.source
    assert found.qp_number == source.queue_pair.number
    assert (found.lid, found.pkey_index) == (own.lid, 0)
    if own.gid_type != "InfiniBand":
        assert len(found.header) == 40
        assert found.gid == own.gid
        assert found.local_gid == sink.queue_pair.local_endpoint().gid
        assert found.gid_type in ("", own.gid_type)
    assert ndpy.DatagramSource.from_native(b"\0" * 28 + b"\x05" + b"\0" * 51).qp_number == 5


def test_an_answer_goes_back(stations, keep, adapter):
    source, sink = stations
    sink.queue_pair.receive(memory(keep, adapter, 64))
    source.queue_pair.send(memory(keep, adapter, b"question"), destination(keep, source, sink))
    (question,) = succeed(sink.cq)
    inbox = memory(keep, adapter, 64)
    source.queue_pair.receive(inbox, context=9)
    sink.queue_pair.send(memory(keep, adapter, b"answer"), keep(sink.queue_pair.destination(question.source)))
    assert [
        completion.context for completion in succeed(source.cq, 2) if completion.operation is Operation.RECEIVE
    ] == [9]
    assert contents(inbox)[:7] == b"answer\0"


def test_headers_of_several_datagrams_are_kept_apart(station, keep, adapter):
    """Each one tells its own sender, also when its receive was posted again before its completion was taken."""
    sink, senders = station(receive_queue_depth=3), [station() for _ in range(4)]
    inbox = memory(keep, adapter, 64)
    found = []
    for _ in range(3):
        sink.queue_pair.receive(inbox)
    for number, sender in enumerate(senders * 3):
        sender.queue_pair.send(memory(keep, adapter, bytes([number])), destination(keep, sender, sink))
        succeed(sender.cq)
        # arm() takes the completion from the adapter, and it waits in the queue.
        sink.cq.arm().result(DEADLINE_S)
        sink.queue_pair.receive(inbox)
        if number % 2:
            found += succeed(sink.cq, 2)
    assert [completion.source.qp_number for completion in found] == [sender.queue_pair.number for sender in senders * 3]


def test_a_number_comes_with_it(stations, keep, adapter):
    source, sink = stations
    for context in (1, 2):
        sink.queue_pair.receive(memory(keep, adapter, 64), context=context)
    there = destination(keep, source, sink)
    source.queue_pair.send(memory(keep, adapter, b"with"), there, immediate=0x81020304)
    source.queue_pair.send(memory(keep, adapter, b"without"), there)
    with_number, without = succeed(sink.cq, 2)
    assert (with_number.immediate, without.immediate) == (0x81020304, None)
    assert with_number.source.qp_number == without.source.qp_number == source.queue_pair.number


def test_several_elements_and_inline_bytes(station, keep, adapter):
    options = {"max_initiator_sge": 2, "max_receive_sge": 2}
    inline = Capability.INLINE in adapter.info.capabilities
    source, sink = station(**options, inline_data_size=16 if inline else 0), station(**options)
    there = destination(keep, source, sink)
    inbox = memory(keep, adapter, 64)
    sink.queue_pair.receive([inbox[0:3], inbox[10:20]])
    letters = memory(keep, adapter, b"abcdef")
    source.queue_pair.send([letters[3:6], letters[0:3]], there)
    succeed(sink.cq)
    assert contents(inbox)[:14] == b"def" + bytes(7) + b"abc" + bytes(1)
    if inline:
        sink.queue_pair.receive(inbox)
        source.queue_pair.send(b"inline", there, flags=Flags.INLINE)
        (received,) = succeed(sink.cq)
        assert (received.nbytes, contents(inbox)[:6]) == (6, b"inline")


def test_a_batch_and_an_array(stations, keep, adapter):
    source, sink = stations
    inbox = memory(keep, adapter, 64)
    receives = Batch(4)
    for place in range(4):
        receives.receive(inbox[place * 8 : place * 8 + 8], context=place)
    letters = memory(keep, adapter, b"abcdefgh")
    batch = Batch(4)
    there = destination(keep, source, sink)
    for place in range(4):
        batch.send_to(letters[place : place + 2], there, immediate=place or None)
    taken = CompletionArray(8)
    for _ in range(2):
        sink.queue_pair.post(receives)
        source.queue_pair.post(batch)
        assert len(succeed(source.cq)) == 1
        found = []
        while len(found) < 4:
            wait_until(lambda: sink.cq.poll_into(taken), "four datagrams")
            taken.raise_for_status()
            found += taken
        assert [(c.context, c.nbytes, c.immediate) for c in found] == [(0, 2, None), (1, 2, 1), (2, 2, 2), (3, 2, 3)]
        assert {c.source.qp_number for c in found} == {source.queue_pair.number}
        assert contents(inbox)[:26] == b"ab" + bytes(6) + b"bc" + bytes(6) + b"cd" + bytes(6) + b"de"


def test_a_plain_send_of_a_batch_is_refused(stations, keep, adapter):
    source, _ = stations
    batch = Batch(1)
    batch.send(memory(keep, adapter, b"where to?"))
    with pytest.raises(ndpy.UnsupportedError):
        source.queue_pair.post(batch)
    with pytest.raises(TypeError, match="a destination is a Destination"):
        batch.send_to(memory(keep, adapter, b"where to?"), "there")
    with pytest.raises(TypeError, match="a destination is a Destination, not NoneType"):
        source.queue_pair.send(memory(keep, adapter, b"where to?"), None)


def test_the_longest_datagram_is_the_mtu(stations, keep, adapter):
    source, sink = stations
    most = source.queue_pair.max_datagram
    assert most == adapter.info.mtu
    sink.queue_pair.receive(memory(keep, adapter, most), context=1)
    outbox = memory(keep, adapter, most + 1)
    there = destination(keep, source, sink)
    source.queue_pair.send(outbox[:most], there)
    assert [(c.context, c.nbytes) for c in succeed(sink.cq)] == [(1, most)]
    with pytest.raises(ndpy.LimitExceededError, match=f"{most + 1} bytes are more than the {most}"):
        source.queue_pair.send(outbox, there)


def test_what_nobody_receives_is_lost(stations, keep, adapter):
    source, sink = stations
    there = destination(keep, source, sink)
    for context in range(3):
        source.queue_pair.send(memory(keep, adapter, b"lost"), there, context=context)
    assert contexts(succeed(source.cq, 3)) == [0, 1, 2]
    assert_quiet(sink.cq)
    sink.queue_pair.receive(memory(keep, adapter, 64), context=5)
    source.queue_pair.send(memory(keep, adapter, b"found"), there)
    assert [(c.context, c.nbytes) for c in succeed(sink.cq)] == [(5, 5)]


def test_a_wrong_qkey_is_not_received(stations, keep, adapter):
    source, sink = stations
    sink.queue_pair.receive(memory(keep, adapter, 64), context=5)
    source.queue_pair.send(memory(keep, adapter, b"wrong"), destination(keep, source, sink, qkey=0x22222222))
    assert_quiet(sink.cq)
    source.queue_pair.send(memory(keep, adapter, b"right"), destination(keep, source, sink))
    assert [(c.context, c.nbytes) for c in succeed(sink.cq)] == [(5, 5)]


def test_a_solicited_datagram_notifies(stations, keep, adapter):
    source, sink = stations
    there = destination(keep, source, sink)
    for solicited in (False, True):
        sink.queue_pair.receive(memory(keep, adapter, 64))
        armed = sink.cq.arm(Notify.SOLICITED)
        source.queue_pair.send(memory(keep, adapter, b"8 bytes!"), there, flags=Flags.SOLICITED if solicited else 0)
        succeed(source.cq)
        if solicited:
            armed.result(10)
        else:
            with pytest.raises(ndpy.TimeoutError):
                armed.result(0.2)
            armed.cancel()
        succeed(sink.cq)


def test_silent_sends_leave_no_completion(stations, keep, adapter):
    source, sink = stations
    there = destination(keep, source, sink)
    outbox = memory(keep, adapter, b"silent")

    def post(**options):
        assert source.cq.poll() == []
        try:
            source.queue_pair.send(outbox, there, **options)
        except ndpy.QueueFullError:
            return False
        return True

    for _ in range(40):
        wait_until(lambda: post(flags=Flags.SILENT_SUCCESS), "room in the queue")
    wait_until(lambda: post(context=3), "room in the queue")
    assert contexts(succeed(source.cq)) == [3]


def test_what_it_has_not_is_refused(stations, keep, adapter):
    source, sink = stations
    region = memory(keep, adapter, 8, Access.REMOTE_READ | Access.REMOTE_WRITE)
    for call in (
        lambda: source.queue_pair.read(region, region.remote()),
        lambda: source.queue_pair.write(region, region.remote()),
        lambda: source.queue_pair.fetch_and_add(region, region.remote(), 1),
        lambda: source.queue_pair.send_and_invalidate(region, region.remote()),
        lambda: source.queue_pair.connect_endpoint(sink.queue_pair.local_endpoint()),
    ):
        with pytest.raises(ndpy.UnsupportedError, match="a queue pair of type UD sends datagrams only"):
            call()
    with pytest.raises(ndpy.InvalidFlagsError, match="send takes the flags SILENT_SUCCESS, SOLICITED and INLINE"):
        source.queue_pair.send(region, destination(keep, source, sink), flags=Flags.READ_FENCE)
    with pytest.raises(ndpy.UnsupportedError, match="connects queue pairs of type RC, not UD"):
        keep(adapter.create_connector()).begin_connect(source.queue_pair, (adapter.info.addresses[0], 9))


def test_values_out_of_range_are_refused(stations, keep, adapter):
    source, sink = stations
    there = sink.queue_pair.local_endpoint()
    vector = AddressVector(gid=there.gid, gid_index=there.gid_index)
    with pytest.raises(ValueError, match="give qp_number"):
        source.queue_pair.destination(vector)
    for options in ({"qp_number": 1 << 24}, {"qp_number": -1}, {"qp_number": 5, "qkey": 1 << 32}):
        with pytest.raises(ValueError, match="is 0 to"):
            source.queue_pair.destination(vector, **options)
    with pytest.raises(ndpy.LimitExceededError, match="qkey is 0 to"):
        adapter.create_datagram_queue_pair(source.cq, qkey=1 << 32)
    with pytest.raises(ndpy.LimitExceededError, match="max_receive_sge is 0 to"):
        adapter.create_datagram_queue_pair(source.cq, max_receive_sge=32)
    with pytest.raises(ValueError, match="create_datagram_queue_pair"):
        adapter.create_queue_pair(source.cq, type=QueuePairType.UD)
    for options, message in (
        ({"context": 1 << 64}, "context is 0 to"),
        ({"context": -1}, "context is 0 to"),
        ({"flags": 1 << 32}, "flags"),
    ):
        with pytest.raises(ValueError, match=message):
            source.queue_pair.send([], destination(keep, source, sink), **options)
    with pytest.raises(ValueError, match="immediate is 0 to"):
        source.queue_pair.send([], destination(keep, source, sink), immediate=-1)


def test_a_destination_lives_as_long_as_its_request(stations, keep, adapter):
    source, sink = stations
    inbox = memory(keep, adapter, 64)
    for context in range(2):
        sink.queue_pair.receive(inbox, context=context)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        source.queue_pair.send(
            memory(keep, adapter, b"one"), source.queue_pair.destination(sink.queue_pair.local_endpoint())
        )
        batch = Batch(1)
        batch.send_to(memory(keep, adapter, b"two"), source.queue_pair.destination(sink.queue_pair.local_endpoint()))
        source.queue_pair.post(batch)
        del batch
        gc.collect()
        assert [found.nbytes for found in succeed(sink.cq, 2)] == [3, 3]
        succeed(source.cq, 2)
        gc.collect()
        # The adapter's thread closes what was dropped.
        wait_until(
            lambda: not any("Destination" in child._describe() for child in adapter._open_children()), "the close"
        )


def test_a_closed_destination_is_refused(stations, keep, adapter):
    source, sink = stations
    there = destination(keep, source, sink)
    there.close()
    there.close()
    with pytest.raises(ndpy.ClosedError):
        source.queue_pair.send([], there)
    with pytest.raises(ndpy.ClosedError):
        Batch(1).send_to([], there)


def test_the_end_cancels_receives(stations, keep, adapter):
    _, sink = stations
    for context in (1, 2):
        sink.queue_pair.receive(memory(keep, adapter, 64), context=context)
    sink.queue_pair.flush()
    ended = take(sink.cq, 2)
    assert contexts(ended) == [1, 2]
    assert statuses(ended) == [Status.CANCELED] * 2
    assert [found.source for found in ended] == [None, None]


def test_a_queue_with_datagrams_can_be_closed(stations, keep, adapter):
    """What nobody has taken goes with it."""
    source, sink = stations
    there = destination(keep, source, sink)
    for _ in range(3):
        sink.queue_pair.receive(memory(keep, adapter, 64))
        source.queue_pair.send(memory(keep, adapter, b"left"), there)
        succeed(source.cq)
    sink.cq.arm().result(DEADLINE_S)
    sink.queue_pair.close()
    sink.cq.close()


def test_attributes_by_hand(stations, keep, adapter):
    source, sink = stations
    assert source.queue_pair.query().state is QueuePairState.RTS
    assert source.queue_pair.query().qkey == source.queue_pair.qkey
    sink.queue_pair.modify(qkey=0x33333333)
    sink.queue_pair.receive(memory(keep, adapter, 64), context=5)
    source.queue_pair.send(memory(keep, adapter, b"former"), destination(keep, source, sink))
    assert_quiet(sink.cq)
    source.queue_pair.send(memory(keep, adapter, b"right"), destination(keep, source, sink, qkey=0x33333333))
    assert [(c.context, c.nbytes) for c in succeed(sink.cq)] == [(5, 5)]
    with pytest.raises(ndpy.QueuePairAttributesError, match=r"of type UD .* does not take path_mtu"):
        sink.queue_pair.modify(path_mtu=1024)


# Opens an adapter without the privilege, and makes a queue pair with a Q_Key that needs it.
WITHOUT_PRIVILEGE = """
import ctypes, os, sys
if sys.argv[2] == "drop":
    PR_CAPBSET_DROP, CAP_NET_RAW = 24, 13
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_NET_RAW, 0, 0, 0) == 0
    os.execv(sys.executable, [sys.executable, "-c", os.environ["PROGRAM"], sys.argv[1], "try"])
import ndpy
with ndpy.open_adapter(sys.argv[1]) as adapter, adapter.create_completion_queue(4) as cq:
    try:
        adapter.create_datagram_queue_pair(cq, qkey=0x80000001).close()
    except ndpy.PermissionError as error:
        print(error)
"""


def test_a_privileged_qkey_needs_the_privilege(station, adapter):
    if os.geteuid():
        pytest.skip("a program without privileges has none to drop")
    assert station(qkey=0x80000001).queue_pair.query().qkey == 0x80000001
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PRIVILEGE, adapter.info.name, "drop"],
        env={**os.environ, "PROGRAM": WITHOUT_PRIVILEGE, "PYTHONPATH": str(Path(ndpy.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "the Q_Key 0x80000001 needs the privilege CAP_NET_RAW" in done.stdout


@pytest.fixture
def group(adapter):
    """The GID of a multicast group of which this host is a member, as on RoCE it has to be."""
    require(adapter, Capability.DATAGRAMS)
    own = next(address for address in adapter.info.addresses if ":" not in address)
    address = socket.inet_aton("239.7.7.7")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as member:
        member.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, address + socket.inet_aton(own))
        yield bytes(10) + b"\xff\xff" + address


def test_a_multicast_group_gets_what_is_sent_to_it(station, keep, adapter, group):
    sender, members, stranger = station(), [station(), station()], station()
    for member in members:
        member.queue_pair.attach_multicast(group)
    for receiver in (*members, stranger):
        receiver.queue_pair.receive(memory(keep, adapter, 64), context=4)
    own = sender.queue_pair.local_endpoint()
    vector = AddressVector(gid=group, gid_index=own.gid_index, port=own.port, lid=0xC000 if own.lid else 0)
    there = keep(sender.queue_pair.destination(vector, qp_number=0xFFFFFF))
    sender.queue_pair.send(memory(keep, adapter, b"to all of you"), there)
    for member in members:
        (received,) = succeed(member.cq)
        assert (received.context, received.nbytes) == (4, 13)
        assert received.source.qp_number == sender.queue_pair.number
        assert received.source.local_gid == group
    assert_quiet(stranger.cq)
    members[0].queue_pair.detach_multicast(group)
    for member in members:
        member.queue_pair.receive(memory(keep, adapter, 64), context=5)
    sender.queue_pair.send(memory(keep, adapter, b"to the rest"), there)
    succeed(members[1].cq)
    assert_quiet(members[0].cq)
    with pytest.raises(ndpy.ProviderError):
        members[0].queue_pair.detach_multicast(group)
    with pytest.raises(ValueError, match="a group is a GID"):
        stranger.queue_pair.attach_multicast(b"short")
    members[1].queue_pair.detach_multicast(group)


def test_a_group_that_nobody_joined_gets_nothing(station, keep, adapter, group):
    sender, stranger = station(), station()
    stranger.queue_pair.receive(memory(keep, adapter, 64), context=4)
    own = sender.queue_pair.local_endpoint()
    vector = AddressVector(gid=group, gid_index=own.gid_index, port=own.port, lid=0xC000 if own.lid else 0)
    there = keep(sender.queue_pair.destination(vector, qp_number=0xFFFFFF))
    sender.queue_pair.send(memory(keep, adapter, b"to nobody"), there)
    succeed(sender.cq)
    assert_quiet(stranger.cq)
    # It has not spoiled the sender.
    stranger.queue_pair.attach_multicast(group)
    sender.queue_pair.send(memory(keep, adapter, b"to somebody"), there)
    assert [(c.context, c.nbytes) for c in succeed(stranger.cq)] == [(4, 11)]


def test_the_documents_example_runs(stations, keep, adapter, capsys):
    blocks = (Path(__file__).parents[2] / "docs/verbs.md").read_text("utf-8").split("```python\n")[1:]
    (program,) = (block.partition("```")[0] for block in blocks if "destination(" in block.partition("```")[0])
    near, far = stations
    names = {
        "near": near.queue_pair,
        "far": far.queue_pair,
        "near_queue": near.cq,
        "far_queue": far.cq,
        "peer": far.queue_pair.local_endpoint(),
        "source": memory(keep, adapter, b"question"),
        "inbox": memory(keep, adapter, 64),
    }
    exec(compile(program, "docs/verbs.md", "exec"), names)
    for name in ("there", "back"):
        keep(names[name])
    assert capsys.readouterr().out == f"8 bytes from {near.queue_pair.number}\n"


def test_an_adapter_without_them_says_so(keep, adapter):
    if Capability.DATAGRAMS in adapter.info.capabilities:
        pytest.skip(f"{adapter.info.name} has datagrams")
    cq = keep(adapter.create_completion_queue(4))
    with pytest.raises(ndpy.UnsupportedError, match=f"{adapter.info.name} has no datagrams"):
        adapter.create_datagram_queue_pair(cq)
