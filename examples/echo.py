"""An echo server and its client, with asyncio.

    python echo.py server
    python echo.py client 192.0.2.1 --connections 8 --size 64 --count 1000

The server sends back each message that it receives. The client opens many connections at once, and verifies every byte
that comes back. A short message is copied. A long one is read by its receiver from the sender's memory.
"""

import argparse
import asyncio
import statistics
import sys
import time

import ndpy
from ndpy import aio

PORT = 7474
PATTERN = bytes(range(256))


def message(number, size):
    """Message `number` of a client."""
    start = number % 251
    return (PATTERN * (size // 256 + 2))[start : start + size]


async def echo(connection):
    """Serve one client until it closes its connection."""
    async for data in connection:
        await connection.send(data)


async def serve(args):
    left = asyncio.Queue()

    async def handle(connection):
        try:
            async with connection:
                await echo(connection)
        finally:
            left.put_nowait(connection.peer_address[0])

    async with aio.serve(("", args.port), handle, adapter=args.adapter, timeout_s=args.timeout) as server:
        print("listening on {} port {}".format(*server.address[:2]), flush=True)
        count = 0
        while count != args.until:
            print(f"{await left.get()} has left", flush=True)  # waits for ever; Ctrl-C ends it
            count += 1


async def exchange(connection, data):
    await connection.send(data)
    return await connection.receive()


async def talk(args, name):
    """Talk on one connection. Returns the times of its round trips in us."""
    times_us = []
    async with aio.connect((args.host, args.port), adapter=args.adapter, timeout_s=args.timeout) as connection:
        for number in range(name, name + args.count):
            sent = message(number, args.size)
            start = time.perf_counter_ns()
            answer = await asyncio.wait_for(exchange(connection, sent), args.timeout)
            times_us.append((time.perf_counter_ns() - start) / 1000)
            if answer != sent:
                raise RuntimeError(f"message {number - name} of connection {name} came back damaged")
    return times_us


async def measure(args):
    talks = await asyncio.gather(*(talk(args, name) for name in range(args.connections)))
    times_us = [time_us for one in talks for time_us in one]
    print(f"verified {args.count} echoes of {args.size} bytes on each of {args.connections} connections")
    print(
        f"round trip in us: least {min(times_us):.1f}, median {statistics.median(times_us):.1f}, most "
        f"{max(times_us):.1f}"
    )


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server", parents=[common], help="serve until Ctrl-C")
    server.add_argument("--until", type=positive, metavar="N", help="stop after N connections have ended")
    client = roles.add_parser("client", parents=[common], help="send messages and verify what comes back")
    client.add_argument("host")
    client.add_argument("--connections", type=positive, default=4, help="default: %(default)s")
    client.add_argument("--size", type=positive, default=64, metavar="BYTES", help="default: %(default)s")
    client.add_argument("--count", type=positive, default=1000, help="messages on each; default: %(default)s")
    args = parser.parse_args()
    asyncio.run((serve if args.role == "server" else measure)(args))


if __name__ == "__main__":
    try:
        main()
    except asyncio.TimeoutError as error:
        sys.exit(f"echo: {str(error) or 'no answer within --timeout seconds'}")
    except (ndpy.NdpyError, OSError, RuntimeError) as error:
        sys.exit(f"echo: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
