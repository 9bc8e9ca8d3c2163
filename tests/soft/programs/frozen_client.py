"""A client of test_frozen_peers.py.
It takes part until its process is stopped: frozen_client.py message|aio HOST PORT
"""

from __future__ import annotations

import asyncio
import sys

import ndpy
from ndpy import aio


def take_messages(address: tuple[str, int]) -> None:
    with ndpy.open_adapter("soft0") as adapter, adapter.create_completion_queue(16) as cq:
        with adapter.create_queue_pair(cq, receive_queue_depth=4) as queue_pair:
            buffers = [adapter.register(bytearray(5)) for _ in range(3)]
            for number, region in enumerate(buffers):
                queue_pair.receive(region, context=number)
            with adapter.create_connector() as connector:
                connector.connect(queue_pair, address)
                connector.complete_connect()
                print("there", flush=True)
                left = 3
                while left:
                    for completion in cq.wait():
                        data = bytes(buffers[completion.context].buffer)
                        print(completion.status.name, data.rstrip(b"\0").decode(), flush=True)
                        left -= 1
        for region in buffers:
            region.close()


async def take_part(address: tuple[str, int]) -> None:
    async with aio.connect(address, adapter="soft0") as connection:
        await connection.send(b"hello")
        await connection.receive()
        print("there", flush=True)
        print("received", await connection.receive(), flush=True)


where = (sys.argv[2], int(sys.argv[3]))
if sys.argv[1] == "message":
    take_messages(where)
else:
    asyncio.run(take_part(where))
