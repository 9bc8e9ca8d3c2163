"""Speaks the protocol of rping, as client or server. The other end may be rping of rdmacm-utils.

    python rping.py -s -a 192.0.2.1 -v          rping -c -a 192.0.2.1 -v -V -C 10
    rping -s -a 192.0.2.1 -v                    python rping.py -c -a 192.0.2.1 -v -C 10

The connection uses port 7174 and has no private data. Each round of the conversation:

    client  sends the descriptor of its source buffer: address, key, length (8, 4 and 4 bytes in network order)
    server  reads the source buffer by RDMA and sends a message of 16 bytes, whose content has no meaning
    client  sends the descriptor of its sink buffer
    server  writes the text to the sink buffer by RDMA, including the zero byte, and sends another such message

The client disconnects after the last round. This client checks that the sink has the bytes of the source. This
server checks that the source has the bytes of rping: a header with the number of the round, then the characters
from "A" to "z", repeated, starting one character later in each round.
"""

import argparse
import struct
import sys
from contextlib import ExitStack

import ndpy

PORT = 7174
ADVERTISEMENT = struct.Struct("!QII")
SMALLEST, LARGEST = 23, 65535  # what rping's -S takes
LETTERS = bytes(range(ord("A"), ord("z") + 1))


def ping_text(number, size):
    """The source buffer of round `number`, including the zero byte."""
    start = number % len(LETTERS)
    letters = (LETTERS * (size // len(LETTERS) + 2))[start:]
    return (b"rdma-ping-%d: " % number + letters)[: size - 1] + b"\0"


class Side:
    """The queue pair and the message buffers of a client or server."""

    def __init__(self, adapter, timeout_s, stack):
        self.timeout_s = timeout_s
        self.outbox, self.inbox = bytearray(ADVERTISEMENT.size), bytearray(ADVERTISEMENT.size)
        self.out_region = stack.enter_context(adapter.register(self.outbox, ndpy.Access.NONE))
        self.in_region = stack.enter_context(adapter.register(self.inbox, ndpy.Access.LOCAL_WRITE))
        self.received = stack.enter_context(adapter.create_completion_queue(4))
        self.initiated = stack.enter_context(adapter.create_completion_queue(4))
        self.queue_pair = stack.enter_context(adapter.create_queue_pair(self.received, self.initiated))
        self.queue_pair.receive(self.in_region)

    def finish(self):
        """Wait for the one outstanding send, read or write."""
        (completion,) = self.initiated.wait(self.timeout_s)
        completion.raise_for_status()

    def send(self, remote=None):
        """Send the descriptor of `remote`, or a message whose content has no meaning."""
        if remote is not None:
            ADVERTISEMENT.pack_into(self.outbox, 0, remote.address, remote.token, remote.length)
        self.queue_pair.send(self.out_region)
        self.finish()

    def next_message(self):
        """Wait for the next message and return it, or None if the peer disconnected."""
        (completion,) = self.received.wait(self.timeout_s)
        if completion.status is ndpy.Status.CANCELED:
            return None
        completion.raise_for_status()
        if completion.nbytes != ADVERTISEMENT.size:
            sys.exit(f"rping: a message of {completion.nbytes} bytes; rping's have {ADVERTISEMENT.size}")
        message = bytes(self.inbox)
        self.queue_pair.receive(self.in_region)
        return message


def remote_memory(advertisement):
    address, key, length = ADVERTISEMENT.unpack(advertisement)
    return ndpy.RemoteMemory(address, length, key)


def run_server(adapter, args):
    with ExitStack() as stack:
        listener = stack.enter_context(adapter.listen((args.address or "", args.port)))
        print(f"listening on {listener.address[0]} port {listener.address[1]}", flush=True)
        connector = stack.enter_context(listener.get_request())  # waits for ever; Ctrl-C ends it
        data = bytearray(args.size)
        access = ndpy.Access.LOCAL_WRITE | ndpy.Access.READ_SINK
        region = stack.enter_context(adapter.register(data, access))
        side = Side(adapter, args.timeout, stack)
        connector.accept(side.queue_pair, timeout_s=args.timeout)

        number = 0
        while (message := side.next_message()) is not None:
            source = remote_memory(message)
            if source.length > args.size:
                sys.exit(f"rping: the client has {source.length} bytes, the limit here is {args.size} (-S)")
            side.queue_pair.read(region[0 : source.length], source)
            side.finish()
            text = bytes(data[: source.length])
            if text != ping_text(number, source.length):
                sys.exit(f"rping: the data of round {number} are not what rping sends")
            if args.verbose:
                print(f"server ping data: {text[:-1].decode()}", flush=True)
            side.send()

            if (message := side.next_message()) is None:
                sys.exit(f"rping: the client left in the middle of round {number}")
            side.queue_pair.write(region[0 : len(text)], remote_memory(message))
            side.finish()
            side.send()
            number += 1
    print(f"{number} rounds verified; the client has disconnected")


def run_client(adapter, args):
    with ExitStack() as stack:
        source, sink = bytearray(args.size), bytearray(args.size)
        source_region = stack.enter_context(adapter.register(source, ndpy.Access.REMOTE_READ))
        sink_region = stack.enter_context(adapter.register(sink, ndpy.Access.REMOTE_WRITE))
        side = Side(adapter, args.timeout, stack)
        address = (args.address, args.port)
        connector = stack.enter_context(adapter.connect(side.queue_pair, address, timeout_s=args.timeout))
        number = 0
        while not args.count or number < args.count:
            source[:] = ping_text(number, args.size)
            sink[:] = bytes(args.size)
            for advertised in (source_region, sink_region):
                side.send(advertised.remote())
                if side.next_message() is None:
                    sys.exit(f"rping: the server left in round {number}")
            if sink != source:
                sys.exit(f"rping: data mismatch in round {number}")
            if args.verbose:
                print(f"ping data: {sink[:-1].decode()}", flush=True)
            number += 1
        connector.disconnect(timeout_s=args.timeout)
    print(f"{number} rounds of {args.size} bytes verified")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    role = parser.add_mutually_exclusive_group(required=True)
    role.add_argument(
        "-s", dest="role", action="store_const", const=run_server, help="server: serve one client, then stop"
    )
    role.add_argument("-c", dest="role", action="store_const", const=run_client, help="client")
    parser.add_argument(
        "-a", dest="address", metavar="ADDRESS", help="address of the server; on the server, default: all its addresses"
    )
    parser.add_argument("-p", dest="port", type=int, default=PORT, help="default: %(default)s")
    parser.add_argument(
        "-S", dest="size", type=int, help="client: size of the text, default 64; server: the largest accepted size"
    )
    parser.add_argument("-C", dest="count", type=int, default=0, help="number of rounds; default: until Ctrl-C")
    parser.add_argument("-v", dest="verbose", action="store_true", help="print the data")
    parser.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    parser.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    args = parser.parse_args()
    serving = args.role is run_server
    if args.address is None and not serving:
        parser.error("a client needs the server's address: -a ADDRESS")
    args.size = args.size if args.size is not None else LARGEST if serving else 64
    if not SMALLEST <= args.size <= LARGEST:
        parser.error(f"-S {args.size}: sizes are {SMALLEST} to {LARGEST}")
    with ndpy.open_adapter(args.adapter) as adapter:
        args.role(adapter, args)


if __name__ == "__main__":
    try:
        main()
    except (ndpy.NdpyError, OSError) as error:
        sys.exit(f"rping: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
