"""Measures against a program of perftest at the other end: a host that has only ndpy, and one that has only perftest.

    ib_write_bw                                 python perftest_peer.py write_bw 192.0.2.1
    python perftest_peer.py read_lat            ib_read_lat 192.0.2.1

The tests are write_bw, read_bw, send_bw, atomic_bw, and the same with _lat, with one queue pair. Its type is RC, or
what -c says: UC for send and write, UD for send. With -R the connection manager connects it: RC, and UD for send. Then
the address is one of the adapter's. With --write_with_imm, which newer versions of perftest have, writes carry
immediate data.

As with perftest alone, both sides need the same -n, -s, -c, -R and --write_with_imm. The figures of the side that
measures are printed, as perftest defines them. The atomic operation is fetch-and-add.

What UC and UD lose is not sent again. So keep -n below 512 there, the number of receives that a server has posted.

The two ends first speak over TCP (port 18515), the client before the server in each step:

    1. their versions, 16 bytes; then their page sizes and their cache line sizes, integers of 4 bytes in network order
    2. the codes of their MTUs, 2 bytes
    3. addresses: LID, outstanding reads, QPN, PSN, rkey, virtual address and GID as hexadecimal text, 59 bytes without
       a GID and 108 with one. Addresses are sent again to wait for each other.
    4. after a bandwidth test its result: bytes, number, peak and average in MiB/s, and millions of messages a second, 8
        bytes each

With -R they speak by messages on a first connection of type RC, and an address is a structure of 56 bytes, or 64 from
version 6.29 on. Between steps 2 and 3 the client connects the queue pair of the test to the same port. For UD it finds
the server's queue pair there, and before a latency test it sends its own queue pair's number as a datagram with
immediate data.

This is the handshake of perftest 5.70 to 6.x.
"""

import argparse
import dataclasses
import itertools
import re
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
# LID, outstanding reads, QPN, PSN, rkey; the virtual address; GID; numbers of a shared receive queue and of a GID
STRUCTURE = struct.Struct(">5I4xQ16s2I")
STRUCTURE_WITH_MARKERS = struct.Struct(">5I4xQ8x16s2I")
LONGEST_MESSAGE = STRUCTURE_WITH_MARKERS.size
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
class Address:
    """What an end says of itself."""

    lid: int
    reads: int
    qp_number: int
    psn: int
    token: int
    address: int
    gid: bytes | None


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
            self._send(data)
        received = self._receive(len(data))
        if not self.is_client:
            self._send(data)
        return received

    def exchange_versions(self):
        self.version = self.exchange(VERSION.ljust(16, b"\0")).rstrip(b"\0").decode("ascii", "replace")

    def exchange_addresses(self, own):
        return self._decode(self.exchange(self._encode(own)))

    def say_goodbye(self, own):
        self.exchange_addresses(own)
        self._connection.sendall(b"done\0")

    def _send(self, data):
        self._connection.sendall(data)

    def _receive(self, length):
        received = b""
        while len(received) < length:
            part = self._connection.recv(length - len(received))
            if not part:
                sys.exit("perftest_peer: the peer closed the connection; are its options the same as here?")
            received += part
        return received

    def _encode(self, own):
        numbers = f"{own.lid:04x}:{own.reads:04x}:{own.qp_number:06x}:{own.psn:06x}:{own.token:08x}:{own.address:016x}"
        if own.gid is None:
            return f"{numbers}:{0:08x}".encode().ljust(LENGTH_WITHOUT_GID, b"\0")
        gid = ":".join(f"{byte:02x}" for byte in own.gid)
        return f"{numbers}:{gid}:{0:08x}:".encode().ljust(LENGTH_WITH_GID, b"\0")

    def _decode(self, data):
        words = data.rstrip(b"\0").decode().split(":")
        try:
            numbers = [int(word, 16) for word in words[:6]]
            gid = bytes(int(word, 16) for word in words[6:22]) if len(data) == LENGTH_WITH_GID else bytes(16)
            return Address(*numbers, gid)
        except (ValueError, TypeError):
            sys.exit(
                f"perftest_peer: the peer sent {data!r}, which is not an address of perftest; is -x there and not here?"
            )


class ManagedConversation(Conversation):
    """The same by messages on a connection of the connection manager (-R)."""

    def __init__(self, adapter, args, stack):
        self.is_client = args.host is not None
        self._timeout_s = args.timeout
        self._outbox = stack.enter_context(adapter.register(bytearray(LONGEST_MESSAGE), ndpy.Access.NONE))
        self._inbox = stack.enter_context(adapter.register(bytearray(LONGEST_MESSAGE), ndpy.Access.LOCAL_WRITE))
        # The peer has posted one receive, and posts the next one before it answers. So does this end.
        self._received = stack.enter_context(adapter.create_completion_queue(1))
        self._sent = stack.enter_context(adapter.create_completion_queue(1))
        self._queue_pair = stack.enter_context(
            adapter.create_queue_pair(self._received, self._sent, receive_queue_depth=1, initiator_queue_depth=1)
        )
        self._queue_pair.receive(self._inbox)
        self.listener = None
        if self.is_client:
            connector = adapter.connect(self._queue_pair, (args.host, args.port), timeout_s=args.timeout)
        else:
            self.listener = stack.enter_context(adapter.listen(("", args.port)))
            print(f"listening on {self.listener.address[0]} port {self.listener.address[1]}", flush=True)
            connector = self.listener.get_request()  # waits for ever; Ctrl-C ends it
            connector.accept(self._queue_pair, timeout_s=args.timeout)
        self._connector = stack.enter_context(connector)

    def say_goodbye(self, own):
        self.exchange_addresses(own)

    def _send(self, data):
        self._outbox.buffer[: len(data)] = data
        self._queue_pair.send(self._outbox[: len(data)])
        for completion in self._sent.wait(self._timeout_s):
            completion.raise_for_status()

    def _receive(self, length):
        (completion,) = self._received.wait(self._timeout_s)
        completion.raise_for_status()
        data = bytes(self._inbox.buffer[: completion.nbytes])
        if len(data) != length:
            sys.exit(
                f"perftest_peer: the peer sent {len(data)} bytes and not {length}; are its options the same as here?"
            )
        self._queue_pair.receive(self._inbox)
        return data

    @property
    def _format(self):
        numbers = re.findall(r"\d+", self.version)
        return STRUCTURE_WITH_MARKERS if [int(number) for number in numbers] >= [6, 29] else STRUCTURE

    def _encode(self, own):
        numbers = (own.lid, own.reads, own.qp_number, own.psn, own.token, own.address)
        return self._format.pack(*numbers, own.gid or bytes(16), 0, 0)

    def _decode(self, data):
        return Address(*self._format.unpack(data)[:7])


class Test:
    """One run: the resources of this end, and its peer."""

    def __init__(self, adapter, args, stack):
        self.args, self._adapter = args, adapter
        self.length = max(args.size, PAGE)
        access = ndpy.Access.REMOTE_READ | ndpy.Access.REMOTE_WRITE
        if args.test.startswith("atomic"):
            access |= ndpy.Access.REMOTE_ATOMIC
        # The peer uses the first half, and this end sends from the second one and reads into it.
        self.buffer = bytearray(2 * self.length)
        self.region = stack.enter_context(adapter.register(self.buffer, access | SINK))
        self.own = self.region[self.length : self.length + args.size]
        self.cq = stack.enter_context(adapter.create_completion_queue(DEPTH + RECEIVES + 1))
        reads = min(adapter.info.max_inbound_read_limit, adapter.info.max_outbound_read_limit, 16)
        remote = self.region.remote()
        self.address = Address(0, reads, 0, 0, remote.token, remote.address, None)
        there = self._connect_by_manager(stack) if args.managed else self._connect_by_number(stack)
        self.send = self.queue_pair.send
        if args.immediate:
            self.send = lambda memory: self.queue_pair.write(memory, self.memory, immediate=0)
        elif there is not None:
            self.send = lambda memory: self.queue_pair.send(memory, there)
        for _ in range(2):
            self.meet()
        print(f"connected to perftest {self.talk.version}: {self.way}", flush=True)

    def _make_queue_pair(self):
        depths = {"receive_queue_depth": RECEIVES, "initiator_queue_depth": DEPTH}
        if self.args.type != "UD":
            return self._adapter.create_queue_pair(self.cq, type=ndpy.QueuePairType[self.args.type], **depths)
        qkey = ndpy.MANAGER_QKEY if self.args.managed else QKEY
        return self._adapter.create_datagram_queue_pair(self.cq, qkey=qkey, **depths)

    def _introduce(self, own_mtu):
        """Exchange what comes before the addresses. Returns the peer's MTU."""
        self.talk.exchange_versions()
        for number in (PAGE, CACHE_LINE):
            self.talk.exchange(struct.pack(">i", number))
        code = self.talk.exchange(f"{MTUS.index(own_mtu) + 1}".encode().ljust(2, b"\0"))
        return MTUS[int(code.rstrip(b"\0")) - 1]

    def _exchange_addresses(self):
        # The latency tests of writes and reads greet twice.
        for _ in range(2 if self.args.test in ("write_lat", "read_lat", "atomic_lat") else 1):
            self.peer = self.talk.exchange_addresses(self.address)
        self.memory = ndpy.RemoteMemory(self.peer.address, self.length, self.peer.token)[: self.args.size]

    # ---- connecting; each way returns the destination of datagrams, if the queue pair sends such ----

    def _connect_by_number(self, stack):
        self.queue_pair = stack.enter_context(self._make_queue_pair())
        local = self.queue_pair.local_endpoint(gid_index=self.args.gid_index)
        self.talk = stack.enter_context(Conversation(self.args))
        mtu = self._introduce(local.mtu)
        own = self.address
        own.lid, own.qp_number, own.psn = local.lid, local.qp_number, local.psn
        own.gid = None if not local.gid_type or (local.gid_type == "InfiniBand" and local.lid) else local.gid
        self._exchange_addresses()
        peer = self.peer
        numbers = {"lid": peer.lid, "qp_number": peer.qp_number, "psn": peer.psn, "gid": peer.gid}
        endpoint = dataclasses.replace(local, **numbers, mtu=mtu, inbound_read_limit=None)
        self.way = f"{local} with {endpoint}"
        if self.args.type == "UD":
            return stack.enter_context(self.queue_pair.destination(endpoint))
        reads = {"outbound_read_limit": min(own.reads, peer.reads)} if self.args.type == "RC" else {}
        self.queue_pair.connect_endpoint(endpoint, **reads)
        return None

    def _connect_by_manager(self, stack):
        self.talk = ManagedConversation(self._adapter, self.args, stack)
        self._introduce(max(mtu for mtu in MTUS if mtu <= self._adapter.info.mtu))
        self.way = "by the connection manager"
        connect = self._find_queue_pair if self.args.type == "UD" else self._connect
        answer = self._be_found if self.args.type == "UD" else self._accept
        if self.talk.is_client:
            # The server may begin to listen after it has met the client.
            self.meet()
            there = self._until_it_listens(connect, stack)
        else:
            self.queue_pair = stack.enter_context(self._make_queue_pair())
            there = answer(stack)
        self.meet()
        self._exchange_addresses()
        return there

    def _until_it_listens(self, connect, stack):
        deadline = time.monotonic() + self.args.timeout
        while True:
            with ExitStack() as attempt:
                # On iWARP a refused attempt uses the queue pair up.
                self.queue_pair = attempt.enter_context(self._make_queue_pair())
                try:
                    there = connect(attempt)
                except ndpy.ConnectionRefusedError:
                    if time.monotonic() > deadline:
                        raise
                else:
                    stack.push(attempt.pop_all())
                    return there
            time.sleep(0.05)

    def _connect(self, stack):
        where = (self.args.host, self.args.port)
        stack.enter_context(self._adapter.connect(self.queue_pair, where, timeout_s=self.args.timeout))

    def _accept(self, stack):
        self.meet()
        connector = stack.enter_context(self.talk.listener.get_request(self.args.timeout))
        connector.accept(self.queue_pair, timeout_s=self.args.timeout)

    # In a latency test of datagrams the server answers to the queue pair from which a first one comes.

    def _find_queue_pair(self, stack):
        where = (self.args.host, self.args.port)
        there = stack.enter_context(self.queue_pair.resolve(where, timeout_s=self.args.timeout))
        if self.args.test == "send_lat":
            self.queue_pair.send(self.region[:4], there, immediate=self.queue_pair.number)
            self.finish()
        return there

    def _be_found(self, stack):
        expects = self.args.test == "send_lat"
        if expects:
            self.queue_pair.receive(self.region[:4])
        stack.enter_context(self._adapter.listen_for_datagrams(self.queue_pair, self.talk.listener.address))
        self.meet()
        if not expects:
            return None
        (first,) = self.cq.wait(self.args.timeout)
        first.raise_for_status()
        return stack.enter_context(self.queue_pair.destination(first.source))

    def meet(self):
        """Wait until both ends are here."""
        self.talk.exchange_addresses(self.address)

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
            seconds = self.stream(lambda: operation(self.own, self.memory))
        self.meet()
        self.report(seconds)
        self.talk.say_goodbye(self.address)

    def write_bw(self):
        if self.args.immediate:
            self.send_bw()
        else:
            self.one_sided_bandwidth(self.queue_pair.write)

    def read_bw(self):
        self.one_sided_bandwidth(self.queue_pair.read)

    def add_one(self, result, memory):
        self.queue_pair.fetch_and_add(result, memory, 1)

    def atomic_bw(self):
        self.one_sided_bandwidth(self.add_one)

    def send_bw(self):
        args = self.args
        # On iWARP nobody sends a message again that finds no receive. So the receiver tells the sender how many it has
        # taken.
        has_credits = self._adapter.info.transport == "iWARP"
        if not self.talk.is_client:
            for _ in range(RECEIVES):
                self.queue_pair.receive(self.region[: args.size])
        self.meet()
        if self.talk.is_client:
            seconds = self.stream(self._send_within_credit() if has_credits else lambda: self.send(self.own))
        else:
            seconds = self._take_messages(has_credits)
        rate = args.iterations / seconds
        self.show(
            f"{args.iterations} times {args.size} bytes: {args.size * rate / 2**20:.2f} MiB/s, "
            f"{rate / 1e6:.6f} million messages a second"
        )
        self.talk.say_goodbye(self.address)

    def _take_messages(self, has_credits):
        """Take all messages. The first one starts the clock. Returns the seconds."""
        args, taken, start = self.args, 0, 0.0
        while taken < args.iterations:
            for completion in self.cq.wait(args.timeout, 64 if taken else 1):
                completion.raise_for_status()
                if completion.operation is ndpy.Operation.WRITE:
                    continue
                start = start or time.perf_counter()
                taken += 1
                self.queue_pair.receive(self.region[: args.size])
                if has_credits and taken % (self._window // 3) == 0:
                    self._give_credit(taken)
        return time.perf_counter() - start

    @property
    def _window(self):
        """How many receives a receiver of perftest has posted."""
        return max(min(RECEIVES, self.args.iterations), 3)

    def _give_credit(self, taken):
        self.buffer[self.length : self.length + 4] = taken.to_bytes(4, sys.byteorder)
        there = ndpy.RemoteMemory(self.peer.address, 4, self.peer.token)
        self.queue_pair.write(self.region[self.length : self.length + 4], there)

    def _send_within_credit(self):
        numbers = itertools.count(1)

        def send():
            number = next(numbers)
            self.wait_until(
                lambda: number - int.from_bytes(self.buffer[:4], sys.byteorder) < self._window,
                "the peer takes no messages",
            )
            self.send(self.own)

        return send

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
            seconds = []
            for _ in range(self.args.iterations):
                start = time.perf_counter()
                operation(self.own, self.memory)
                self.finish()
                seconds.append(time.perf_counter() - start)
            self.show_latencies(seconds)
        self.talk.say_goodbye(self.address)

    def send_lat(self):
        self.exchange_messages(begins=self.talk.is_client)
        self.talk.say_goodbye(self.address)

    def exchange_messages(self, begins):
        place, seconds = self.region[: self.args.size], []
        for _ in range(min(RECEIVES, self.args.iterations)):
            self.queue_pair.receive(place)
        self.meet()
        for number in range(self.args.iterations):
            start = time.perf_counter()
            if begins:
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

    def write_lat(self):
        """Each end writes the number of the turn into the last byte, and looks at its own memory for the peer's. The
        server begins.
        """
        if self.args.immediate:
            self.exchange_messages(begins=not self.talk.is_client)
            return
        args = self.args
        last, seen, seconds = self.length + args.size - 1, args.size - 1, []

        def wait(number):
            self.wait_until(lambda: self.buffer[seen] == number, "no write of the peer has come")

        for turn in range(1, args.iterations + 1):
            number = turn & 0xFF
            start = time.perf_counter()
            if self.talk.is_client:
                wait(number)
            self.buffer[last] = number
            self.queue_pair.write(self.own, self.memory)
            self.finish()
            if not self.talk.is_client:
                wait(number)
            seconds.append(time.perf_counter() - start)
        self.show_latencies(seconds, 0.5)

    def wait_until(self, ready, complaint):
        deadline = time.monotonic() + self.args.timeout
        while not ready():
            if time.monotonic() > deadline:
                sys.exit(f"perftest_peer: {complaint}: waited {self.args.timeout:g} s")


TESTS = tuple(f"{name}_{kind}" for kind in ("bw", "lat") for name in ("write", "read", "send", "atomic"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("test", choices=TESTS)
    parser.add_argument("host", nargs="?", help="address of the server; without it, this is the server")
    parser.add_argument("-p", dest="port", type=int, default=PORT, help="port; default: %(default)s")
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
    parser.add_argument("-R", dest="managed", action="store_true", help="connect by the connection manager")
    parser.add_argument(
        "--write_with_imm",
        dest="immediate",
        action="store_true",
        help="write with immediate data",
    )
    parser.add_argument("-x", dest="gid_index", type=int, help="GID index; default: the best GID by rank")
    parser.add_argument("--timeout", type=float, default=20, metavar="SECONDS", help="time limit of each step")
    args = parser.parse_intermixed_args()  # HOST may stand behind the options
    operation, _, kind = args.test.partition("_")
    if operation not in TYPES[args.type]:
        parser.error(f"a queue pair of type {args.type} has only {' and '.join(TYPES[args.type])}")
    if args.managed and args.type == "UC":
        parser.error("the connection manager connects no queue pairs of type UC")
    if args.immediate and operation != "write":
        parser.error("--write_with_imm is for write_bw and write_lat")
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
