"""Sends datagrams to itself, and prints what came: python datagram_row.py ADAPTER COUNT [silent] [inline] [list]

The send queue has room for COUNT datagrams and no more. Each has 256 bytes: each of them its number, from 1. The memory
of a datagram is changed as soon as its completion is there.
"""

from __future__ import annotations

import contextlib
import sys
import time

import ndpy
from ndpy import Batch, Capability, Flags

SIZE = 256
QUIET_S = 2.0


def main(name: str, count: int, options: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        keep = stack.enter_context
        adapter = keep(ndpy.open_adapter(name))
        if Capability.DATAGRAMS not in adapter.info.capabilities:
            sys.exit("no datagrams")
        sent_queue, came_queue = (keep(adapter.create_completion_queue(2 * count)) for _ in range(2))
        depths = {"receive_queue_depth": 2 * count, "initiator_queue_depth": count}
        inline = "inline" in options
        source = keep(
            adapter.create_datagram_queue_pair(sent_queue, **depths, inline_data_size=SIZE if inline else 0),
        )
        sink = keep(adapter.create_datagram_queue_pair(came_queue, **depths))
        there = keep(source.destination(sink.local_endpoint()))
        arrived, letters = bytearray(SIZE * 2 * count), bytearray(SIZE * count)
        inbox, outbox = keep(adapter.register(arrived)), keep(adapter.register(letters))
        for place in range(2 * count):
            sink.receive(inbox[place * SIZE : (place + 1) * SIZE], context=place)
        batch = Batch(count)
        for place in range(count):
            part = slice(place * SIZE, (place + 1) * SIZE)
            letters[part] = bytes([place + 1]) * SIZE
            flags = Flags.SILENT_SUCCESS if "silent" in options and place + 1 < count else Flags(0)
            if inline:
                source.send(bytes(letters[part]), there, context=place, flags=flags | Flags.INLINE)
            elif "list" in options:
                batch.send_to(outbox[part], there, context=place, flags=flags)
            else:
                source.send(outbox[part], there, context=place, flags=flags)
        if "list" in options:
            source.post(batch)
        sent, came = [], []
        end = time.monotonic() + QUIET_S
        while time.monotonic() < end:
            for completion in sent_queue.poll():
                completion.raise_for_status()
                sent.append(completion.context + 1)
                done = completion.context + 1 if "silent" in options else 1
                letters[(completion.context + 1 - done) * SIZE : (completion.context + 1) * SIZE] = bytes(done * SIZE)
            for completion in came_queue.poll():
                completion.raise_for_status()
                data = arrived[completion.context * SIZE : (completion.context + 1) * SIZE]
                came.append(data[0] if data == data[:1] * SIZE else -1)
                end = time.monotonic() + QUIET_S
        print("sent", *sent)
        print("came", *came)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
