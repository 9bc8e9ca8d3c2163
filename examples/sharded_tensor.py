"""Fetches a matrix from the peers that hold its rows, all of them at once, with asyncio.

    python sharded_tensor.py hold --part 0 --parts 2          on 192.0.2.1
    python sharded_tensor.py hold --part 1 --parts 2          on 192.0.2.2
    python sharded_tensor.py fetch 192.0.2.1 192.0.2.2

The rows are dealt out: of N parts, part P has the rows P, P + N, P + 2 N, and so on. Each holder sends where its rows
are. The fetcher reads each row into its place in the matrix, with one read_many() for each holder. The holders'
programs do nothing meanwhile. Element (r, c) is r * columns + c, and the fetcher verifies that.
"""

import argparse
import asyncio
import contextlib
import itertools
import struct
import sys

import numpy

import ndpy
from ndpy import aio

PORT = 7477
WELCOME = struct.Struct("!20s4I")  # where the rows are; part, parts, rows, columns


def make(rows, columns):
    return numpy.arange(rows * columns, dtype="f8").reshape(rows, columns)


async def run_hold(args):
    if not 0 <= args.part < args.parts <= args.rows:
        raise ValueError(f"there is no part {args.part} of {args.parts} parts of {args.rows} rows")
    rows, left = make(args.rows, args.columns)[args.part :: args.parts].copy(), asyncio.Queue()

    async def handle(connection):
        try:
            async with connection, connection.expose(rows, ndpy.Access.REMOTE_READ) as remote:
                await connection.send(WELCOME.pack(remote.to_bytes(), args.part, args.parts, args.rows, args.columns))
                async for _ in connection:  # until the fetcher closes it
                    pass
        finally:
            left.put_nowait(connection.peer_address[0])

    async with aio.serve(("", args.port), handle, adapter=args.adapter, timeout_s=args.timeout) as server:
        print("holding {} rows, listening on {} port {}".format(len(rows), *server.address[:2]), flush=True)
        for _ in range(args.until) if args.until else itertools.count():
            print(f"{await left.get()} has left", flush=True)  # waits for ever; Ctrl-C ends it


class Holder:
    def __init__(self, connection, welcome):
        self.connection, self.name = connection, "{} port {}".format(*connection.peer_address[:2])
        remote, self.part, self.parts, *self.shape = WELCOME.unpack(welcome)
        self.remote = ndpy.RemoteMemory.from_bytes(remote)

    async def read_into(self, matrix):
        length = self.shape[1] * matrix.itemsize
        # Registered once, as a whole, so that a row is only a slice.
        with self.connection.adapter.register(matrix, ndpy.Access.LOCAL_WRITE) as region:
            await self.connection.read_many(
                (self.remote[place * length : (place + 1) * length], region[row * length : (row + 1) * length])
                for place, row in enumerate(range(self.part, len(matrix), self.parts))
            )


def check(holders):
    """Raise unless these hold every part of one matrix, once."""
    first = holders[0]
    for holder in holders:
        if (holder.parts, holder.shape) != (first.parts, first.shape):
            raise RuntimeError(f"{holder.name} and {first.name} hold parts of different matrices")
    parts = sorted(holder.part for holder in holders)
    if first.parts != len(parts) or parts != list(range(len(parts))):
        raise RuntimeError(f"the matrix has {first.parts} parts, and these hosts hold the parts {parts}")


async def run_fetch(args):
    async with contextlib.AsyncExitStack() as stack:
        holders = []
        for address in zip(args.hosts, itertools.cycle(args.port), strict=False):
            peer = await stack.enter_async_context(aio.connect(address, adapter=args.adapter, timeout_s=args.timeout))
            holders.append(Holder(peer, await asyncio.wait_for(peer.receive(), args.timeout)))
        check(holders)
        matrix = numpy.zeros(holders[0].shape)
        # If one fails, wait for the others too: they use the memory.
        reads = asyncio.gather(*(holder.read_into(matrix) for holder in holders), return_exceptions=True)
        for error in filter(None, await asyncio.wait_for(reads, args.timeout)):
            raise error
    if not (matrix == make(*matrix.shape)).all():
        raise RuntimeError("the matrix arrived damaged")
    print(f"verified {matrix.shape[0]} rows of {matrix.shape[1]} columns from {len(holders)} holders")


def positive(text):
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    hold = roles.add_parser("hold", parents=[common], help="hold a part of the matrix until Ctrl-C")
    hold.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    hold.add_argument("--part", type=int, default=0, metavar="N", help="the first is 0, which is the default")
    for option, default in (("--parts", 1), ("--rows", 1000), ("--columns", 512)):
        hold.add_argument(option, type=positive, default=default, metavar="N", help="default: %(default)s")
    hold.add_argument("--until", type=positive, metavar="N", help="stop after N fetchers have left")
    fetch = roles.add_parser("fetch", parents=[common], help="fetch the matrix from the holders of all parts")
    fetch.add_argument("hosts", nargs="+", metavar="host")
    fetch.add_argument("--port", type=int, nargs="+", default=[PORT], help="one for all hosts, or one for each")
    args = parser.parse_args()
    asyncio.run((run_hold if args.role == "hold" else run_fetch)(args))


if __name__ == "__main__":
    try:
        main()
    except asyncio.TimeoutError as error:
        sys.exit(f"sharded_tensor: {str(error) or 'no answer within --timeout seconds'}")
    except (ndpy.NdpyError, OSError, RuntimeError, ValueError, MemoryError, struct.error) as error:
        sys.exit(f"sharded_tensor: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
