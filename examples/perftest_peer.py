"""Measures against a program of perftest at the other end: a host that has only ndpy, and one that has only perftest.

    ib_write_bw                                 python perftest_peer.py write_bw 192.0.2.1
    python perftest_peer.py read_lat            ib_read_lat 192.0.2.1

The tests are write_bw, read_bw, send_bw, atomic_bw, and the same with _lat, with one queue pair and without -R. Its type is RC, or
what -c says: UC for send and write, UD for send. As with perftest alone, both sides need the same -n, -s and -c. The figures of the
side that measures are printed, as perftest defines them. The atomic operation is fetch-and-add.

What UC and UD lose is not sent again. So keep -n below 512 there, the number of receives that a server has posted.

The two ends first speak over TCP (port 18515), the client before the server in each step:

    1. their versions, 16 bytes; then their page sizes and their cache line sizes, integers of 4 bytes in network order
    2. the codes of their MTUs, 2 bytes
    3. addresses: LID, outstanding reads, QPN, PSN, rkey, virtual address and GID as hexadecimal text, 59 bytes without a GID and 108
       with one. Addresses are sent again to wait for each other.
    4. after a bandwidth test its result: bytes, number, peak and average in MiB/s, and millions of messages a second, 8 bytes each

This is the handshake of perftest 5.70 to 6.x.
"""

import argparse
import dataclasses
import socket
import struct
import sys
import time
from contextlib import ExitStack

import ndpy

PORT = 18515
VERSION = b"6.06"
PAGE, CACHE_LINE = 4096, 64
MTUS = (256, 512, 1024, 2048, 4096)
LENGTH_WITHOUT_GID, LENGTH_WITH_GID = 59, 108
SINK = ndpy.Access.LOCAL_WRITE | ndpy.Access.READ_SINK
# How many requests are outstanding in a bandwidth test.
DEPTH = 128
RECEIVES = 512
QKEY = 0x11111111  # that of perftest's queue pairs of type UD
TYPES = {
    "RC": ("send", "write", "read", "atomic"),
    "UC": ("send", "write"),
    "UD": ("send",),
}


@dataclasses.dataclass
class Peer:
    """What the other end says of itself."""

    endpoint: ndpy.Endpoint
    memory: ndpy.RemoteMemory
    reads: int


class Conversation:
    """The TCP connection. In each step the client speaks first."""

    def __init__(self, args):
        self.is_client = args.host is not None
        if self.is_client:
            try:
                self._connection = socket.create_connection((args.host, args.port), timeout=args.timeout)
            except OSError as error:
                sys.exit(
                    f"perftest_peer: {args.host} TCP port {args.port}: {error.strerror or error}; "
                    "check the address, the network, and that a server listens there"
                )
        else:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            with socket.create_server(("", args.port), family=family, dualstack_ipv6=dual) as listener:
                print(f"listening on TCP port {listener.getsockname()[1]}", flush=True)
                self._connection, _ = listener.accept()  # waits for ever; Ctrl-C ends it
            self._connection.settimeout(args.timeout)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._connection.close()

    def exchange(self, data):
        """Send bytes, and return as many of the peer."""
        if self.is_client:
            self._connection.sendall(data)
        received = b""
        while len(received) < len(data):
            part = self._connection.recv(len(data) - len(received))
            if not part:
                sys.exit("perftest_peer: the peer closed the connection; are its options the same as here?")
            received += part
        if not self.is_client:
            self._connection.sendall(data)
        return received

    def say_goodbye(self, own):
        self.exchange(own)
        self._connection.sendall(b"done\0")


def own_address(local, region, reads):
    remote = region.remote()
    numbers = (
        f"{local.lid:04x}:{reads:04x}:{local.qp_number:06x}:{local.psn:06x}:{remote.token:08x}:{remote.address:016x}"
    )
    if not local.gid_type or (local.gid_type == "InfiniBand" and local.lid):
        return f"{numbers}:{0:08x}".encode().ljust(LENGTH_WITHOUT_GID, b"\0")
    gid = ":".join(f"{byte:02x}" for byte in local.gid)
    return f"{numbers}:{gid}:{0:08x}:".encode().ljust(LENGTH_WITH_GID, b"\0")


def parse_address(data, local, mtu, length):
    words = data.rstrip(b"\0").decode().split(":")
    try:
        lid, reads, number, psn, token, address = (int(word, 16) for word in words[:6])
        gid = bytes(int(word, 16) for word in words[6:22]) if len(data) == LENGTH_WITH_GID else bytes(16)
    except ValueError:
        sys.exit(f"perftest_peer: the peer sent {data!r}, which is no address of perftest; is -x there and not here?")
    endpoint = dataclasses.replace(local, lid=lid, qp_number=number, psn=psn, gid=gid, mtu=mtu, inbound_read_limit=None)
    return Peer(endpoint, ndpy.RemoteMemory(address, length, token), reads)


class Test:
    """One run: the resources of this end, and its peer."""

    def __init__(self, adapter, args, stack):
        self.args = args
        self.length = max(args.size, PAGE)
        access = ndpy.Access.REMOTE_READ | ndpy.Access.REMOTE_WRITE
        if args.test.startswith("atomic"):
            access |= ndpy.Access.REMOTE_ATOMIC
        # The peer uses the first half, and this end sends from the second one and reads into it.
        self.buffer = bytearray(2 * self.length)
        self.region = stack.enter_context(adapter.register(self.buffer, access | SINK))
        self.own = self.region[self.length : self.length + args.size]
        self.cq = stack.enter_context(adapter.create_completion_queue(DEPTH + RECEIVES + 1))
        depths = {"receive_queue_depth": RECEIVES, "initiator_queue_depth": DEPTH}
        if args.type == "UD":
            made = adapter.create_datagram_queue_pair(self.cq, qkey=QKEY, **depths)
        else:
            made = adapter.create_queue_pair(self.cq, type=ndpy.QueuePairType[args.type], **depths)
        self.queue_pair = stack.enter_context(made)
        self.local = self.queue_pair.local_endpoint(gid_index=args.gid_index)
        self.talk = stack.enter_context(Conversation(args))
        self._introduce(adapter, stack)

    def _introduce(self, adapter, stack):
        version = self.talk.exchange(VERSION.ljust(16, b"\0")).rstrip(b"\0").decode("ascii", "replace")
        for number in (PAGE, CACHE_LINE):
            self.talk.exchange(struct.pack(">i", number))
        code = self.talk.exchange(f"{MTUS.index(self.local.mtu) + 1}".encode().ljust(2, b"\0"))
        mtu = MTUS[int(code.rstrip(b"\0")) - 1]
        reads = min(adapter.info.max_inbound_read_limit, adapter.info.max_outbound_read_limit, 16)
        self.address = own_address(self.local, self.region, reads)
        # The latency tests of writes and reads greet twice.
        for _ in range(2 if self.args.test in ("write_lat", "read_lat", "atomic_lat") else 1):
            self.peer = parse_address(self.talk.exchange(self.address), self.local, mtu, self.length)
        self.send = self.queue_pair.send
        if self.args.type == "UD":
            there = stack.enter_context(self.queue_pair.destination(self.peer.endpoint))
            self.send = lambda memory: self.queue_pair.send(memory, there)
        elif self.args.type == "UC":
            self.queue_pair.connect_endpoint(self.peer.endpoint)
        else:
            self.queue_pair.connect_endpoint(self.peer.endpoint, outbound_read_limit=min(reads, self.peer.reads))
        for _ in range(2):
            self.meet()
        print(f"connected to perftest {version}: {self.local} with {self.peer.endpoint}", flush=True)

    def meet(self):
        """Wait until both ends are here."""
        self.talk.exchange(self.address)

    def finish(self, count=1):
        """Wait for that many completions."""
        while count:
            for completion in self.cq.wait(self.args.timeout, count):
                completion.raise_for_status()
                count -= 1

    # ---- bandwidth ----

    def stream(self, post):
        """Post all requests, as many at once as the queue takes. Returns the seconds."""
        args, outstanding = self.args, 0
        start = time.perf_counter()
        for left in reversed(range(args.iterations)):
            post()
            outstanding += 1
            if outstanding == DEPTH or not left:
                self.finish(outstanding)
                outstanding = 0
        return time.perf_counter() - start

    def report(self, seconds):
        """Tell the peer the result, or get the peer's. Prints it."""
        args = self.args
        rate = args.iterations / seconds / 1e6 if seconds else 0.0
        average = args.size * rate * 1e6 / 2**20
        numbers = (struct.pack(">q", args.size), struct.pack(">q", args.iterations))
        for number in numbers:
            self.talk.exchange(number)
        figures = [self.talk.exchange(struct.pack(">d", figure)) for figure in (average, average, rate)]
        if not self.talk.is_client:
            _, average, rate = (struct.unpack(">d", figure)[0] for figure in figures)
        self.show(
            f"{args.iterations} times {args.size} bytes: {average:.2f} MiB/s, {rate:.6f} million messages a second"
        )

    def show(self, text):
        print(f"{self.args.test}: {text}", flush=True)

    def one_sided_bandwidth(self, operation):
        seconds = 0.0
        if self.talk.is_client:
            memory = self.peer.memory[: self.args.size]
            seconds = self.stream(lambda: operation(self.own, memory))
        self.meet()
        self.report(seconds)
        self.talk.say_goodbye(self.address)

    def write_bw(self):
        self.one_sided_bandwidth(self.queue_pair.write)

    def read_bw(self):
        self.one_sided_bandwidth(self.queue_pair.read)

    def add_one(self, result, memory):
        self.queue_pair.fetch_and_add(result, memory, 1)

    def atomic_bw(self):
        self.one_sided_bandwidth(self.add_one)

    def send_bw(self):
        args, place = self.args, self.region[: self.args.size]
        if not self.talk.is_client:
            for _ in range(RECEIVES):
                self.queue_pair.receive(place)
        self.meet()
        if self.talk.is_client:
            seconds = self.stream(lambda: self.send(self.own))
        else:
            # The first message starts the clock.
            self.finish()
            start, left = time.perf_counter(), args.iterations - 1
            self.queue_pair.receive(place)
            while left:
                arrived = self.cq.wait(args.timeout, min(left, 64))
                for completion in arrived:
                    completion.raise_for_status()
                    self.queue_pair.receive(place)
                left -= len(arrived)
            seconds = time.perf_counter() - start
        rate = args.iterations / seconds
        self.show(
            f"{args.iterations} times {args.size} bytes: {args.size * rate / 2**20:.2f} MiB/s, "
            f"{rate / 1e6:.6f} million messages a second"
        )
        self.talk.say_goodbye(self.address)

    # ---- latency ----

    def show_latencies(self, seconds, part=1.0):
        """Print latencies. part: of a round trip."""
        each_us = sorted(second * part * 1e6 for second in seconds)
        count = len(each_us)
        self.show(
            f"{count} times {self.args.size} bytes: {each_us[0]:.2f} usec at least, {each_us[count // 2]:.2f} typical, "
            f"{each_us[-1]:.2f} at most, {sum(each_us) / count:.2f} on average"
        )

    def read_lat(self):
        self.one_sided_latency(self.queue_pair.read)

    def atomic_lat(self):
        self.one_sided_latency(self.add_one)

    def one_sided_latency(self, operation):
        if self.talk.is_client:
            seconds, memory = [], self.peer.memory[: self.args.size]
            for _ in range(self.args.iterations):
                start = time.perf_counter()
                operation(self.own, memory)
                self.finish()
                seconds.append(time.perf_counter() - start)
            self.show_latencies(seconds)
        self.talk.say_goodbye(self.address)

    def send_lat(self):
        place, seconds = self.region[: self.args.size], []
        for _ in range(min(RECEIVES, self.args.iterations)):
            self.queue_pair.receive(place)
        self.meet()
        for number in range(self.args.iterations):
            start = time.perf_counter()
            if self.talk.is_client:
                self.send(self.own)
                self.finish(2)
            else:
                self.finish()
                self.send(self.own)
                self.finish()
            seconds.append(time.perf_counter() - start)
            if number + RECEIVES < self.args.iterations:
                self.queue_pair.receive(place)
        self.show_latencies(seconds, 0.5)
        self.talk.say_goodbye(self.address)

    def write_lat(self):
        """Each end writes the number of the turn into the last byte, and looks at its own memory for the peer's. The server begins."""
        args, memory = self.args, self.peer.memory[: self.args.size]
        last, seen, seconds = self.length + args.size - 1, args.size - 1, []
        for turn in range(1, args.iterations + 1):
            start = time.perf_counter()
            if self.talk.is_client:
                self.wait_for_byte(seen, turn & 0xFF)
            self.buffer[last] = turn & 0xFF
            self.queue_pair.write(self.own, memory)
            self.finish()
            if not self.talk.is_client:
                self.wait_for_byte(seen, turn & 0xFF)
            seconds.append(time.perf_counter() - start)
        self.show_latencies(seconds, 0.5)

    def wait_for_byte(self, place, value):
        deadline = time.monotonic() + self.args.timeout
        while self.buffer[place] != value:
            if time.monotonic() > deadline:
                sys.exit(f"perftest_peer: no write of the peer came within {self.args.timeout:g} s")


TESTS = tuple(f"{name}_{kind}" for kind in ("bw", "lat") for name in ("write", "read", "send", "atomic"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("test", choices=TESTS)
    parser.add_argument("host", nargs="?", help="address of the server; without it, this is the server")
    parser.add_argument("-p", dest="port", type=int, default=PORT, help="TCP port; default: %(default)s")
    parser.add_argument("-d", dest="adapter", help="name of the adapter; default: the first active one")
    parser.add_argument(
        "-c", dest="type", choices=TYPES, default="RC", help="type of the queue pair; default: %(default)s"
    )
    parser.add_argument(
        "-s",
        dest="size",
        type=int,
        help="bytes in a message; default: 65536, 2 for latency, the MTU for UD; atomic: always 8",
    )
    parser.add_argument(
        "-n", dest="iterations", type=int, help="number of messages; default: 1000, and 5000 for write_bw"
    )
    parser.add_argument("-x", dest="gid_index", type=int, help="GID index; default: the best GID by rank")
    parser.add_argument("--timeout", type=float, default=20, metavar="SECONDS", help="time limit of each step")
    args = parser.parse_intermixed_args()  # HOST may stand behind the options
    operation, _, kind = args.test.partition("_")
    if operation not in TYPES[args.type]:
        parser.error(f"a queue pair of type {args.type} has only {' and '.join(TYPES[args.type])}")
    args.size = 8 if operation == "atomic" else args.size or (2 if kind == "lat" else 65536)
    args.iterations = args.iterations or (5000 if args.test == "write_bw" else 1000)
    if args.size < 1 or args.iterations < 2:
        parser.error("-s is 1 or more, and -n is 2 or more")
    with ndpy.open_adapter(args.adapter) as adapter, ExitStack() as stack:
        if args.type == "UD":
            args.size = min(args.size, adapter.info.mtu)
        getattr(Test(adapter, args, stack), args.test)()


if __name__ == "__main__":
    try:
        main()
    except (ndpy.NdpyError, OSError) as error:
        sys.exit(f"perftest_peer: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
