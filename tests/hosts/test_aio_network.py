"""Connections of ndpy.aio between two hosts whose network loses frames. tests/soak/busy_connections.py accounts for
every byte.
"""

from __future__ import annotations

import asyncio

import pytest
from hosts.soaking import HANG_S, Process
from kit.helpers import SEED, only_under_stress, wait_until

from ndpy import aio

PORT = 7475
# Both processes import Python and end their connections in an emulated machine.
_SLACK_S = HANG_S + 60.0


@pytest.mark.timeout(300)
def test_messages_go_on_when_acknowledgements_have_been_lost(
    adapter, adapter_name, peer_host, network, nothing_leaks, peer_address
):
    """The adapter repeats what is behind them, and must do nothing twice. See Quirk.RXE_BINDS_AGAIN."""
    sink = peer_host.call("hosts.aio_sink:Sink", adapter_name, peer_address, takes=True)
    messages = [bytes([place]) * (20_000 if place % 2 else 100) for place in range(12)]

    async def send_all() -> None:
        async with aio.connect(sink.address, adapter=adapter, timeout_s=30, close_timeout_s=30) as connection:
            await connection.send(messages[0])
            loop = asyncio.get_running_loop()
            retry = connection.queue_pair.retry
            # So long that the adapter repeats what was sent, and not so long that it gives up.
            muted_s = 3.0 if retry.gives_up_s is None else 1.5 * retry.gives_up_s / (retry.retry_count + 1)
            muting = network.mute()
            await loop.run_in_executor(None, muting.__enter__)
            try:
                sending = [asyncio.ensure_future(connection.send(message)) for message in messages[1:]]
                ended, waiting = await asyncio.wait(sending, timeout=muted_s)
                assert [task.exception() for task in ended] == [None] * len(ended)
                assert waiting
            finally:
                await loop.run_in_executor(None, muting.__exit__, None, None, None)
            await asyncio.wait_for(asyncio.gather(*sending), 60)

    try:
        asyncio.run(send_all())
        wait_until(lambda: len(sink.taken) == len(messages), "all messages", 30)
        assert list(sink.taken) == messages
    finally:
        sink.stop()


@only_under_stress
@pytest.mark.timeout(1800)
def test_every_byte_of_connections_that_come_and_go_is_accounted_for(
    adapter_name, peer_host, network, nothing_leaks, peer_address
):
    """Ten minutes. The server is on the other host. Clients here are killed."""
    print(f"seed {SEED} (NDPY_TEST_SEED)")
    seconds = 600
    with network.disturbed("loss", "1%"):
        server = peer_host.call("hosts.soaking:Process", seconds, adapter_name, "--serve", f"{peer_address}:{PORT}")
        clients = Process(seconds, adapter_name, "--peer", f"{peer_address}:{PORT}")
        status, output = clients.end(seconds + _SLACK_S)
        print(output)
        there, served = server.end(_SLACK_S if status == 0 else 1.0)
        print(served)
    assert status == 0, output
    assert there == 0, served
    assert "every byte was accounted for" in served
