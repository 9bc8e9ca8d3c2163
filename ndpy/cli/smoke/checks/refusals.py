"""Group refusals: wrong use is told at once, in words, and nothing is lost by it."""

from __future__ import annotations

import ndpy
from ndpy import Access, Flags
from ndpy.cli.smoke.catalog import check
from ndpy.cli.smoke.lab import Lab, expect, expect_ok, refusal


@check("refusals", "not-connected")
def not_connected(lab: Lab) -> str:
    """Sends, reads and writes before a connection are refused; a receive is taken."""
    line = lab.line()
    memory = lab.memory(64)
    remote = ndpy.RemoteMemory(0x1000, 64, 1)
    with refusal(ndpy.NotConnectedError, "a send before the connection"):
        line.queue_pair.send(memory.region)
    with refusal(ndpy.NotConnectedError, "a write before the connection"):
        line.queue_pair.write(memory.region, remote)
    with refusal(ndpy.NotConnectedError, "a read before the connection"):
        line.queue_pair.read(memory.region, remote)
    line.queue_pair.receive(memory.region)
    lab.connect(line).alive()
    return "NotConnectedError; the queue pair connects afterwards"


@check("refusals", "full-queue")
def full_queue(lab: Lab) -> str:
    """A full queue refuses one more request, and takes it after a completion."""
    pair = lab.connect(receives=0)
    memory = lab.memory(64)
    depth = pair.queue_pair.limits.receive_queue_depth
    for index in range(depth):
        pair.queue_pair.receive(memory.region, context=index)
    with refusal(ndpy.QueueFullError, "one receive more than the queue holds"):
        pair.queue_pair.receive(memory.region, context=depth)
    far = lab.far_memory(4096, Access.REMOTE_WRITE, pair)
    limit = pair.queue_pair.limits.initiator_queue_depth
    for index in range(limit):
        pair.queue_pair.write(memory.region, far.remote[0:64], context=index)
    try:
        pair.queue_pair.write(memory.region, far.remote[0:64], context=limit)
    except ndpy.QueueFullError:
        more = 0
    else:
        # Slots are free again when completions are taken, not when the adapter is done.
        more = 1
    expect(not more, f"{limit + 1} writes were taken by a queue of {limit} although no completion was")
    expect_ok(pair.take(limit, "the writes"), "the writes")
    pair.queue_pair.write(memory.region, far.remote[0:64], context=limit)
    expect_ok(pair.take(1, "the write that was refused before"), "the write that was refused before")
    return f"QueueFullError after {depth} receives and {limit} writes"


@check("refusals", "outside-the-region")
def outside_the_region(lab: Lab) -> str:
    """An element that is not wholly inside its region, and a transfer longer than the remote memory, are refused."""
    pair = lab.connect()
    memory = lab.memory(4096)
    far = lab.far_memory(64, Access.REMOTE_WRITE, pair)
    with refusal(ndpy.ElementRangeError, "an element past the region's end"):
        memory.region[4000:4097]
    with refusal(ndpy.ElementRangeError, "an element before the region's start"):
        memory.region[-1:10]
    with refusal(ndpy.ElementRangeError, "a write longer than the remote memory"):
        pair.queue_pair.write(memory.region[0:65], far.remote)
    pair.alive()
    return "ElementRangeError; the connection works"


@check("refusals", "foreign-region")
def foreign_region(lab: Lab) -> str:
    """A region of another open adapter is refused, even of the same device."""
    pair = lab.connect()
    with ndpy.open_adapter(lab.info.name) as other, other.register(bytearray(64)) as region:
        with refusal(ndpy.ForeignObjectError, "sending from another adapter's region"):
            pair.queue_pair.send(region)
        with refusal(ndpy.ForeignObjectError, "receiving into another adapter's region"):
            pair.queue_pair.receive(region)
    pair.alive()
    return "ForeignObjectError; the connection works"


@check("refusals", "bad-buffers")
def bad_buffers(lab: Lab) -> str:
    """An empty buffer, a scattered one and memory that is not mapped are refused."""
    adapter = lab.adapter
    with refusal(ndpy.InvalidBufferError, "registering an empty buffer"):
        adapter.register(bytearray()).close()
    with refusal(ndpy.InvalidBufferError, "registering every second byte of a buffer"):
        adapter.register(memoryview(bytearray(64))[::2]).close()
    with refusal(ndpy.NdpyError, "registering memory that is not mapped"):
        adapter.register((0x10000, 4096)).close()
    adapter.register(bytearray(64)).close()
    return "each refused"


@check("refusals", "too-many-elements")
def too_many_elements(lab: Lab) -> str:
    """More elements than the queue pair was made for, and queues beyond the adapter's limits, are refused."""
    adapter, info = lab.adapter, lab.info
    pair = lab.connect()
    memory = lab.memory(64)
    with refusal(ndpy.LimitExceededError, "two elements on a queue pair for one"):
        pair.queue_pair.send([memory.region[0:1], memory.region[1:2]])
    with refusal(ndpy.LimitExceededError, "a completion queue deeper than the limit"):
        adapter.create_completion_queue(info.max_completion_queue_depth + 1).close()
    with refusal(ndpy.LimitExceededError, "a queue pair deeper than the limit"):
        adapter.create_queue_pair(pair.near.cq, initiator_queue_depth=info.max_initiator_queue_depth + 1).close()
    with refusal(ndpy.LimitExceededError, "a queue pair with more elements than the limit"):
        adapter.create_queue_pair(pair.near.cq, max_initiator_sge=info.max_initiator_sge + 1).close()
    pair.alive()
    return "LimitExceededError; the connection works"


@check("refusals", "bad-flags")
def bad_flags(lab: Lab) -> str:
    """Flags that an operation does not take are refused."""
    pair = lab.connect()
    memory = lab.memory(64, Access.LOCAL_WRITE | Access.READ_SINK)
    far = lab.far_memory(64, Access.REMOTE_READ | Access.REMOTE_WRITE, pair)
    with refusal(ndpy.InvalidFlagsError, "a solicited write"):
        pair.queue_pair.write(memory.region, far.remote, flags=Flags.SOLICITED)
    with refusal(ndpy.InvalidFlagsError, "an inline read"):
        pair.queue_pair.read(memory.region, far.remote, flags=Flags.INLINE)
    pair.alive()
    return "InvalidFlagsError; the connection works"


@check("refusals", "after-close")
def after_close(lab: Lab) -> str:
    """Whatever is closed refuses its use; closing it again is harmless."""
    adapter = lab.adapter
    line = lab.line()
    region = adapter.register(bytearray(64))
    region.close()
    region.close()
    with refusal(ndpy.ClosedError, "receiving into a closed region"):
        line.queue_pair.receive(region)
    line.queue_pair.close()
    line.queue_pair.close()
    with refusal(ndpy.ClosedError, "posting on a closed queue pair"):
        line.queue_pair.receive(lab.ping.region)
    line.cq.close()
    with refusal(ndpy.ClosedError, "polling a closed completion queue"):
        line.cq.poll()
    return "ClosedError"


@check("refusals", "in-use")
def in_use(lab: Lab) -> str:
    """A completion queue and an adapter in use refuse to be closed, naming what uses them."""
    line = lab.line()
    with refusal(ndpy.DeviceBusyError, "closing a completion queue in use") as said:
        line.cq.close()
    expect("QueuePair" in said[0], f"the refusal does not name the queue pair: {said[0]}")
    line.queue_pair.receive(lab.memory(64).region)
    with refusal(ndpy.DeviceBusyError, "closing an adapter in use"):
        lab.adapter.close()
    return "DeviceBusyError, and both go on working"
