"""The loops of `make bench` with ndpy.

python loops_ndpy.py ADAPTER: prints a line of JSON for each loop. See timing.py and loops.c.
"""

import platform
import sys

from timing import BATCH, LENGTH, PAGE, RECEIVES, measure

import ndpy
from ndpy import Access, Flags

LOOPS = {
    "write_afresh": """
        write(region[0:8], remote, context=7)
        while not poll():
            empty.append(0)
    """,
    "write_kept": """
        write(element, remote, context=7)
        while not poll():
            empty.append(0)
    """,
    "write_batch": """
        post(batch)
        while not poll_into(array):
            empty.append(0)
    """,
    "write_module_afresh": """
        queue_pair.write(region[0:8], remote, context=turn)
        while not (found := queue.poll(1)):
            empty.append(0)
    """,
    "write_module": """
        queue_pair.write(element, remote, context=turn)
        while not (found := queue.poll(1)):
            empty.append(0)
    """,
    "write_64_calls": """
        for _ in range(63):
            write(element, remote, context=7, flags=silent)
        write(element, remote, context=7)
        while not poll():
            empty.append(0)
    """,
    "write_64_list": """
        post(writes)
        while not poll_into(array):
            empty.append(0)
    """,
    "poll_empty": "poll()",
    "poll_module": "found = queue.poll(1)",
    "register_4k": "register(buffer).close()",
    "receive_64_list": "post_receives_of(receives)",
    "poll_64": "poll_receives(64)",
    "poll_64_array": "poll_receives_into(array)",
    "poll_64_looked_at": """
        for completion in poll_receives(64):
            completion.context
            completion.status
    """,
    "slice_region": "region[0:8]",
    "cache_hit": "lease(buffer).release()",
    "write_of_1000": """
        write_of_1000(element, remote, context=7)
        while not poll_of_1000():
            empty.append(0)
    """,
}


def prepare(name):
    """Two connected queue pairs, what the loops use of them, and what a loop needs later."""
    adapter = ndpy.open_adapter(name)
    queue = adapter.create_completion_queue(2 * BATCH)
    receive_queue = adapter.create_completion_queue(RECEIVES)
    client = adapter.create_queue_pair(queue, initiator_queue_depth=2 * BATCH, receive_queue_depth=1)
    server = adapter.create_queue_pair(receive_queue, queue, initiator_queue_depth=1, receive_queue_depth=RECEIVES)
    client.connect_endpoint(server.local_endpoint())
    server.connect_endpoint(client.local_endpoint())
    region = adapter.register(ndpy.alloc(PAGE))
    target = adapter.register(ndpy.alloc(PAGE), Access.REMOTE_WRITE)
    element, landing, remote = region[0:LENGTH], target[0:LENGTH], target.remote(0, LENGTH)
    cache = ndpy.RegistrationCache(adapter, max_bytes=1 << 20, max_entries=16)

    def take_one():
        while not (taken := queue.poll()):
            pass
        taken[0].raise_for_status()

    def check():
        client.write(element, remote)
        take_one()

    batch, writes, sends, receives = (ndpy.Batch(count) for count in (1, BATCH, BATCH, BATCH))
    batch.write(element, remote, context=7)
    for _ in range(BATCH):
        writes.write(element, remote, context=7)
        sends.send(element)
        receives.receive(landing, context=7)

    def post_receives():
        for _ in range(RECEIVES // BATCH):
            server.post(receives)

    def deliver():
        for _ in range(RECEIVES // BATCH):
            client.post(sends)
            take_one()

    def drain():
        count = 0
        while taken := receive_queue.poll():
            taken[-1].raise_for_status()
            count += len(taken)
        return count

    # rxe finds one of many queue pairs a little later than one of few.
    def make_crowd():
        busy_queue = adapter.create_completion_queue(2 * BATCH)
        crowd = [
            adapter.create_queue_pair(busy_queue, initiator_queue_depth=2 * BATCH, receive_queue_depth=1)
            for _ in range(1000)
        ]
        one_of_many = crowd[500]
        busy_server = adapter.create_queue_pair(receive_queue, queue, initiator_queue_depth=1, receive_queue_depth=1)
        one_of_many.connect_endpoint(busy_server.local_endpoint())
        busy_server.connect_endpoint(one_of_many.local_endpoint())
        return {
            "write_of_1000": one_of_many.write,
            "poll_of_1000": busy_queue.poll,
            "crowd_kept_alive": (crowd, busy_server),
        }

    names = {
        "queue_pair": client,
        "queue": queue,
        "write": client.write,
        "poll": queue.poll,
        "poll_into": queue.poll_into,
        "array": ndpy.CompletionArray(BATCH),
        "poll_receives": receive_queue.poll,
        "poll_receives_into": receive_queue.poll_into,
        "post": client.post,
        "post_receives_of": server.post,
        "batch": batch,
        "writes": writes,
        "receives": receives,
        "register": adapter.register,
        "lease": cache.local,
        "region": region,
        "element": element,
        "remote": remote,
        "silent": Flags.SILENT_SUCCESS,
        "buffer": ndpy.alloc(PAGE),
        "empty": [],
        "check": check,
        "post_receives": post_receives,
        "deliver": deliver,
        "drain": drain,
        # A remote memory does not keep its region.
        "kept_alive": target,
    }
    return names, {"write_of_1000": make_crowd}


if __name__ == "__main__":
    about = {"version": ndpy.__version__, "python": platform.python_version()}
    measure("ndpy", about, LOOPS, *prepare(sys.argv[1]))
