"""A server of ndpy.aio that sends nothing, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading

import ndpy
from ndpy import aio


class Sink:
    """Serves until stop(), or until its process ends. It takes all messages or none."""

    def __init__(self, adapter_name: str, address: str, *, takes: bool) -> None:
        self.address: tuple[str, int] = (address, 0)
        self.taken: list[bytes] = []
        self._takes = takes
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(adapter_name)), daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the server has not begun"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _serve(self, adapter_name: str) -> None:
        async def handle(connection: aio.Connection) -> None:
            if not self._takes:
                await connection.wait_closed()
            async for message in connection:
                self.taken.append(bytes(message))

        with ndpy.open_adapter(adapter_name) as adapter:
            async with aio.serve(self.address, handle, adapter=adapter) as server:
                self.address = server.address[:2]
                self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
                self._ready.set()
                await self._stopped.wait()
