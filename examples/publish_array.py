"""Publishes a NumPy array to many subscribers, which read it from the publisher's memory, with asyncio.

    python publish_array.py publish array.npy --versions 10 --interval 1
    python publish_array.py fetch 192.0.2.1 --output copy.npy
    python publish_array.py subscribe 192.0.2.1

The conversation:

    publisher   sends where the array is (20 bytes: address, length, token) and its type and shape (JSON)
    publisher   sends the number and the checksum of a version
    subscriber  reads the array into an array of its own, verifies the checksum, and sends the number back
    publisher   changes the array when all subscribers have answered, and sends the next number

Each subscriber's adapter reads the array from the publisher's memory. Nothing is copied on the way. Here each version
is the one before, rotated by one element.
"""

import argparse
import asyncio
import contextlib
import hashlib
import json
import struct
import sys

import numpy

import ndpy
from ndpy import aio

PORT = 7476
DESCRIPTOR_LENGTH = 20
VERSION = struct.Struct("!Q32s")  # number and SHA-256
ANSWER = struct.Struct("!Q")


class Publisher:
    """Has an array, and publishes one version of it after the other."""

    def __init__(self, array, timeout_s):
        self.array, self.timeout_s = array, timeout_s
        self.number, self.digest = 0, digest_of(array)
        self.subscribers = self.readers = self.first_reads = 0
        self.ended = False
        self.changed = asyncio.Condition()

    async def serve(self, connection):
        """Serve one subscriber, until it leaves or has read the last version."""
        peer = connection.peer_address[0]
        self.subscribers += 1
        try:
            await self._tell(connection)
            await connection.close()
        except aio.ConnectionEndedError:
            print(f"{peer} has left", flush=True)
        except asyncio.TimeoutError as error:
            print(f"{peer} was dropped: {str(error) or 'it did not answer'}", file=sys.stderr, flush=True)
        except (ndpy.NdpyError, OSError, RuntimeError) as error:
            print(f"{peer} was dropped: {error}", file=sys.stderr, flush=True)
        finally:
            self.subscribers -= 1
            await self._notify()

    async def _tell(self, connection):
        """Tell a subscriber of each version, and wait until it has read it."""
        async with connection.expose(self.array, ndpy.Access.REMOTE_READ) as remote:
            kind = {"dtype": self.array.dtype.str, "shape": self.array.shape}
            await connection.send(remote.to_bytes() + json.dumps(kind).encode())
            last = None
            while (number := await self._begin_reading(last)) is not None:
                try:
                    await connection.send(VERSION.pack(number, self.digest))
                    if await asyncio.wait_for(connection.receive(), self.timeout_s) != ANSWER.pack(number):
                        raise RuntimeError(f"its answer to version {number} is wrong")
                    self.first_reads += last is None
                finally:
                    self.readers -= 1
                    await self._notify()
                last = number

    async def _begin_reading(self, last):
        """Wait for a version after `last`. It stays as it is while there are readers.
        Returns None after the last one.
        """
        await self._until(lambda: self.ended or self.number != last)
        if self.number == last:
            return None
        self.readers += 1
        return self.number

    async def publish(self, change):
        """Call change() when nobody reads, and tell all subscribers."""
        await self._until(lambda: not self.readers)
        change()
        self.number, self.digest = self.number + 1, digest_of(self.array)
        await self._notify()

    async def end(self):
        """Wait until all subscribers have read the last version."""
        self.ended = True
        await self._notify()
        await self._until(lambda: not self.subscribers)

    async def wait_for_subscribers(self, count):
        """Wait until `count` subscribers have read a version."""
        await self._until(lambda: self.first_reads >= count)

    async def _until(self, condition):
        async with self.changed:
            await self.changed.wait_for(condition)

    async def _notify(self):
        async with self.changed:
            self.changed.notify_all()


def digest_of(array):
    return hashlib.sha256(array).digest()


def load(path):
    """The array of a file, or one for trying, in memory that begins at a page."""
    loaded = numpy.load(path, allow_pickle=False) if path else numpy.arange(100_000.0)
    if not loaded.nbytes or loaded.dtype.fields:
        raise ValueError(f"the array in {path} is empty or has fields: {loaded.dtype} {loaded.shape}")
    array = numpy.frombuffer(ndpy.alloc(loaded.nbytes), loaded.dtype).reshape(loaded.shape)
    array[...] = loaded
    return array


async def run_publish(args):
    array = load(args.file)
    publisher = Publisher(array, args.timeout)
    async with aio.serve(("", args.port), publisher.serve, adapter=args.adapter, timeout_s=args.timeout) as server:
        where = "{} port {}".format(*server.address[:2])
        print(f"publishing {array.dtype} {array.shape}, listening on {where}", flush=True)
        await publisher.wait_for_subscribers(args.subscribers)
        while publisher.number + 1 != args.versions:
            await asyncio.sleep(args.interval)
            await publisher.publish(lambda: numpy.copyto(array, numpy.roll(array, 1)))
        await publisher.end()
    print(f"published {publisher.number + 1} versions")


async def versions(connection, timeout_s):
    """Yield (number, array) of each version. The array is always the same one."""
    welcome = await asyncio.wait_for(connection.receive(), timeout_s)
    remote = ndpy.RemoteMemory.from_bytes(welcome[:DESCRIPTOR_LENGTH])
    kind = json.loads(welcome[DESCRIPTOR_LENGTH:])
    # read() registers the memory at the first time, and finds it registered from then on.
    array = numpy.frombuffer(ndpy.alloc(remote.length), kind["dtype"]).reshape(kind["shape"])
    async for message in connection:
        number, digest = VERSION.unpack(message)
        await connection.read(remote, into=array)
        if digest_of(array) != digest:
            raise RuntimeError(f"version {number} arrived damaged")
        await connection.send(ANSWER.pack(number))
        yield number, array


async def run_subscribe(args):
    count = 0
    async with (
        aio.connect((args.host, args.port), adapter=args.adapter, timeout_s=args.timeout) as connection,
        contextlib.aclosing(versions(connection, args.timeout)) as received,
    ):
        async for number, array in received:
            count += 1
            print(f"verified version {number}: {array.dtype} {array.shape}, {array.nbytes} bytes", flush=True)
            if args.role == "fetch":
                if args.output:
                    numpy.save(args.output, array)
                break
    if not count:
        raise RuntimeError("the publisher had ended")
    print(f"received {count} versions")


def count(text):
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    publish = roles.add_parser("publish", parents=[common], help="publish the array of a .npy file")
    publish.add_argument("file", nargs="?", help="default: an array of 100,000 numbers")
    publish.add_argument("--versions", type=count, default=0, help="stop after this many; default: go on until Ctrl-C")
    publish.add_argument("--interval", type=float, default=1, metavar="SECONDS", help="between two versions")
    publish.add_argument("--subscribers", type=count, default=1, metavar="N", help="change nothing before N have come")
    fetch = roles.add_parser("fetch", parents=[common], help="read the array once")
    fetch.add_argument("--output", metavar="FILE", help="save it there, in .npy format")
    subscribe = roles.add_parser("subscribe", parents=[common], help="read each version until the publisher ends")
    for role in (fetch, subscribe):
        role.add_argument("host")
    args = parser.parse_args()
    asyncio.run((run_publish if args.role == "publish" else run_subscribe)(args))


if __name__ == "__main__":
    try:
        main()
    except asyncio.TimeoutError as error:
        sys.exit(f"publish_array: {str(error) or 'no answer within --timeout seconds'}")
    except (ndpy.NdpyError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f"publish_array: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
