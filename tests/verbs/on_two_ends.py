"""A program with both ends of a link: two adapters of this machine that reach each other through a veth pair only.

python on_two_ends.py silence_with_seven|silence_with_default|leaving|shrink ADAPTER ADAPTER NETDEV NETDEV
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kit.helpers import DEADLINE_S, Keeper, Offer, Pair, create_end, establish, host_of, memory, take

import ndpy
from ndpy import Access, RetryPolicy, Status

# What the machine takes beside the adapter's time. Emulated machines are slow.
SLACK_S = 2.0
# ndpy's own limit after a failed request.
FAREWELL_S = 2.0


def say(*words: object) -> None:
    print(*words, flush=True)


def silence(*netdevs: str) -> float:
    """From now on nothing arrives at the other end, and the ports stay active. Returns the time."""
    for netdev in netdevs:
        subprocess.run(
            ["tc", "qdisc", "add", "dev", netdev, "root", "netem", "loss", "100%"], check=True, timeout=DEADLINE_S
        )
    return time.monotonic()


def connect(keep: Keeper, near: str, far: str, retry: RetryPolicy | None) -> Pair:
    """The client's end is on `near`, the server's on `far`."""
    adapters = [ndpy.open_adapter(name) for name in (near, far)]
    client, server = (create_end(keep, adapter) for adapter in adapters)
    listener = keep(adapters[1].listen((host_of(adapters[1]), 0)))
    connector = keep(adapters[0].create_connector())
    connecting = connector.begin_connect(client.queue_pair, listener.address, retry=retry)
    offer = Offer(listener, connecting, connector, keep(listener.get_request(DEADLINE_S)))
    establish(offer, server.queue_pair, retry=retry)
    client.connector, server.connector = offer.client, offer.server
    return Pair(adapters[0], client, server)


def close(keep: Keeper, pair: Pair) -> None:
    """Close everything. Nobody has to wait for a host that does not answer."""
    adapters = [end.queue_pair.adapter for end in pair]
    begin = time.monotonic()
    keep.close()
    say(f"closed in {time.monotonic() - begin:.2f} s")
    for adapter in adapters:
        adapter.close()
    say(f"adapters closed in {time.monotonic() - begin:.2f} s")


def end_of_a_request(pair: Pair, end, silent_since: float) -> None:
    """A request of `end` fails in the time of the connection's policy, and the connection ends soon after that."""
    policy = end.queue_pair.retry
    (failed,) = take(end.cq, timeout_s=4 * policy.gives_up_s + SLACK_S)
    took_s = time.monotonic() - silent_since
    assert failed.status is Status.IO_TIMEOUT, failed
    begin = time.monotonic()
    end.connector.wait_disconnected(FAREWELL_S + SLACK_S)
    say(
        f"{policy}: failed after {took_s:.2f} s of {policy.gives_up_s:.2f} s, ended {time.monotonic() - begin:.2f} s "
        f"later"
    )


def in_silence(names: list[str], netdevs: list[str], retry: RetryPolicy | None) -> None:
    keep = Keeper()
    pair = connect(keep, *names, retry)
    source = memory(keep, pair.adapter, 4096)
    sink = memory(keep, pair.server.queue_pair.adapter, 4096, Access.REMOTE_WRITE)
    pair.client.queue_pair.receive([], context=100)
    deadline = time.monotonic() + 0.5
    while time.monotonic() < deadline:
        pair.client.queue_pair.write(source, sink.remote())
        take(pair.client.cq)[0].raise_for_status()
    since = silence(*netdevs)
    for context in range(3):
        pair.client.queue_pair.write(source, sink.remote(), context=context)
    end_of_a_request(pair, pair.client, since)
    rest = take(pair.client.cq, 3)
    assert sorted(completion.context for completion in rest) == [1, 2, 100]
    assert {completion.status for completion in rest} == {Status.CANCELED}
    # The other end posts nothing, so it knows nothing.
    assert pair.server.connector.state == "established"
    begin = time.monotonic()
    pair.server.queue_pair.write([], sink.remote()[0:0])
    end_of_a_request(pair, pair.server, begin)
    close(keep, pair)


def silence_with_seven(names: list[str], netdevs: list[str]) -> None:
    in_silence(names, netdevs, RetryPolicy(retry_count=7, ack_timeout=14))


def silence_with_default(names: list[str], netdevs: list[str]) -> None:
    in_silence(names, netdevs, None)


def leaving(names: list[str], netdevs: list[str]) -> None:
    """No request has failed, so only the connection manager finds out. Nobody has to wait for it."""
    keep = Keeper()
    pair = connect(keep, *names, None)
    pair.client.queue_pair.receive([])
    silence(*netdevs)
    try:
        pair.client.connector.disconnect(1.0)
    except ndpy.TimeoutError:
        say("disconnect() has ended")
    assert [completion.status for completion in take(pair.client.cq)] == [Status.CANCELED]
    close(keep, pair)


def shrink(names: list[str], netdevs: list[str]) -> None:
    """The path's MTU shrinks below what the queue pair uses.
    Its packets do not fit any more, so a request has to fail.
    """
    keep = Keeper()
    pair = connect(keep, *names, RetryPolicy(retry_count=3, ack_timeout=14))
    source = memory(keep, pair.adapter, 65536)
    sink = memory(keep, pair.server.queue_pair.adapter, 65536, Access.REMOTE_WRITE)
    pair.client.queue_pair.write(source, sink.remote())
    take(pair.client.cq)[0].raise_for_status()
    for netdev in netdevs:
        subprocess.run(["ip", "link", "set", netdev, "mtu", "1500"], check=True, timeout=DEADLINE_S)
    pair.client.queue_pair.write(source, sink.remote())
    begin, busy_s = time.monotonic(), kernel_time_s()
    deadline = begin + 4 * pair.client.queue_pair.retry.gives_up_s + SLACK_S
    while not (completions := pair.client.cq.poll()) and time.monotonic() < deadline:
        time.sleep(0.05)
    say(f"the kernel was busy for {kernel_time_s() - busy_s:.1f} of {time.monotonic() - begin:.1f} s")
    say(f"{len(completions)} completions: {completions}")
    close(keep, pair)
    begin, busy_s = time.monotonic(), kernel_time_s()
    time.sleep(1)
    say(f"closed: busy for {kernel_time_s() - busy_s:.1f} of {time.monotonic() - begin:.1f} s")


def kernel_time_s() -> float:
    """How long all processors together have been in the kernel: system, irq and softirq."""
    words = Path("/proc/stat").read_text().split()
    return (int(words[3]) + int(words[6]) + int(words[7])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2:4], sys.argv[4:6])
