"""Group refusals: wrong use is refused at once, with a message, and breaks nothing."""

from __future__ import annotations

import ndpy
from ndpy import Access, Flags
from ndpy.tools.cli.smoke.catalog import check
from ndpy.tools.cli.smoke.testbed import BOTH, SINK, Testbed, expect, refusal


@check("refusals", "not-connected")
def not_connected(testbed: Testbed) -> str:
    """Without a connection, sends, reads and writes are refused. A receive is accepted."""
    end = testbed.new_end()
    memory = testbed.memory(64)
    remote = ndpy.RemoteMemory(0x1000, 64, 1)
    with refusal(ndpy.NotConnectedError, "a send before the connection"):
        end.queue_pair.send(memory.region)
    with refusal(ndpy.NotConnectedError, "a write before the connection"):
        end.queue_pair.write(memory.region, remote)
    with refusal(ndpy.NotConnectedError, "a read before the connection"):
        end.queue_pair.read(memory.region, remote)
    end.queue_pair.receive(memory.region)
    testbed.connect(end).expect_alive()
    return "NotConnectedError; the queue pair connects afterwards"


@check("refusals", "full-queue")
def full_queue(testbed: Testbed) -> str:
    """A full queue refuses another request. After a completion it accepts one."""
    connection = testbed.connect(receives=0)
    memory = testbed.memory(64)
    depth = connection.queue_pair.limits.receive_queue_depth
    for index in range(depth):
        connection.queue_pair.receive(memory.region, context=index)
    with refusal(ndpy.QueueFullError, "one receive more than the queue holds"):
        connection.queue_pair.receive(memory.region, context=depth)
    far = testbed.peer_memory(4096, Access.REMOTE_WRITE, connection)
    limit = connection.queue_pair.limits.initiator_queue_depth
    for index in range(limit):
        connection.queue_pair.write(memory.region, far.remote[0:64], context=index)
    try:
        connection.queue_pair.write(memory.region, far.remote[0:64], context=limit)
    except ndpy.QueueFullError:
        more = 0
    else:
        # A slot becomes free when its completion is taken, not when the adapter finishes the request.
        more = 1
    expect(not more, f"a queue of {limit} accepted {limit + 1} writes before a completion was taken")
    connection.take_ok(limit, "the writes")
    connection.queue_pair.write(memory.region, far.remote[0:64], context=limit)
    connection.take_ok(1, "the write that was refused before")
    return f"QueueFullError after {depth} receives and {limit} writes"


@check("refusals", "outside-the-region")
def outside_the_region(testbed: Testbed) -> str:
    """An element outside its region is refused, and so is a transfer that is longer than the remote memory."""
    connection, memory, far = testbed.set_up(4096, Access.LOCAL_WRITE, Access.REMOTE_WRITE, 64)
    with refusal(ndpy.ElementRangeError, "an element past the region's end"):
        memory.region[4000:4097]
    with refusal(ndpy.ElementRangeError, "an element before the region's start"):
        memory.region[-1:10]
    with refusal(ndpy.ElementRangeError, "a write longer than the remote memory"):
        connection.queue_pair.write(memory.region[0:65], far.remote)
    connection.expect_alive()
    return "ElementRangeError; the connection works"


@check("refusals", "foreign-region")
def foreign_region(testbed: Testbed) -> str:
    """A region of another open adapter is refused, even if both are the same device."""
    connection = testbed.connect()
    with ndpy.open_adapter(testbed.info.name) as other, other.register(bytearray(64)) as region:
        with refusal(ndpy.ForeignObjectError, "sending from another adapter's region"):
            connection.queue_pair.send(region)
        with refusal(ndpy.ForeignObjectError, "receiving into another adapter's region"):
            connection.queue_pair.receive(region)
    connection.expect_alive()
    return "ForeignObjectError; the connection works"


@check("refusals", "bad-buffers")
def bad_buffers(testbed: Testbed) -> str:
    """Registering is refused for an empty buffer, a buffer that is not contiguous, and memory that is not mapped."""
    adapter = testbed.adapter
    with refusal(ndpy.InvalidBufferError, "registering an empty buffer"):
        adapter.register(bytearray()).close()
    with refusal(ndpy.InvalidBufferError, "registering every second byte of a buffer"):
        adapter.register(memoryview(bytearray(64))[::2]).close()
    with refusal(ndpy.NdpyError, "registering memory that is not mapped"):
        adapter.register((0x10000, 4096)).close()
    adapter.register(bytearray(64)).close()
    return "each refused"


@check("refusals", "too-many-elements")
def too_many_elements(testbed: Testbed) -> str:
    """More elements than the queue pair allows are refused, and so are queues beyond the adapter's limits."""
    adapter, info = testbed.adapter, testbed.info
    connection = testbed.connect()
    memory = testbed.memory(64)
    with refusal(ndpy.LimitExceededError, "two elements on a queue pair for one"):
        connection.queue_pair.send([memory.region[0:1], memory.region[1:2]])
    with refusal(ndpy.LimitExceededError, "a completion queue deeper than the limit"):
        adapter.create_completion_queue(info.max_completion_queue_depth + 1).close()
    with refusal(ndpy.LimitExceededError, "a queue pair deeper than the limit"):
        adapter.create_queue_pair(connection.near.cq, initiator_queue_depth=info.max_initiator_queue_depth + 1).close()
    with refusal(ndpy.LimitExceededError, "a queue pair with more elements than the limit"):
        adapter.create_queue_pair(connection.near.cq, max_initiator_sge=info.max_initiator_sge + 1).close()
    connection.expect_alive()
    return "LimitExceededError; the connection works"


@check("refusals", "bad-flags")
def bad_flags(testbed: Testbed) -> str:
    """Flags that an operation does not have are refused."""
    connection, memory, far = testbed.set_up(64, SINK, BOTH)
    with refusal(ndpy.InvalidFlagsError, "a solicited write"):
        connection.queue_pair.write(memory.region, far.remote, flags=Flags.SOLICITED)
    with refusal(ndpy.InvalidFlagsError, "an inline read"):
        connection.queue_pair.read(memory.region, far.remote, flags=Flags.INLINE)
    connection.expect_alive()
    return "InvalidFlagsError; the connection works"


@check("refusals", "after-close")
def after_close(testbed: Testbed) -> str:
    """A closed object refuses to be used. Closing it again is harmless."""
    adapter = testbed.adapter
    end = testbed.new_end()
    region = adapter.register(bytearray(64))
    region.close()
    region.close()
    with refusal(ndpy.ClosedError, "receiving into a closed region"):
        end.queue_pair.receive(region)
    end.queue_pair.close()
    end.queue_pair.close()
    with refusal(ndpy.ClosedError, "posting on a closed queue pair"):
        end.queue_pair.receive(testbed.ping.region)
    end.cq.close()
    with refusal(ndpy.ClosedError, "polling a closed completion queue"):
        end.cq.poll()
    return "ClosedError"


@check("refusals", "in-use")
def in_use(testbed: Testbed) -> str:
    """A completion queue or adapter that is in use refuses to be closed, with a message that says what uses it."""
    end = testbed.new_end()
    with refusal(ndpy.DeviceBusyError, "closing a completion queue in use") as said:
        end.cq.close()
    expect("QueuePair" in said[0], f"the refusal does not name the queue pair: {said[0]}")
    end.queue_pair.receive(testbed.memory(64).region)
    with refusal(ndpy.DeviceBusyError, "closing an adapter in use"):
        testbed.adapter.close()
    return "DeviceBusyError; both still work"
