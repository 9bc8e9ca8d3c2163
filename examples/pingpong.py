"""Two processes exchange messages, verify them, and time the round trips.

    python pingpong.py server
    python pingpong.py client 192.0.2.1 --size 64 --count 1000

The client gives the size of the messages in the private data of its connection request. The server answers
message number i of the client with message number i of its own. Both sides check every byte.
"""

import argparse
import statistics
import struct
import sys
import time
from contextlib import ExitStack

import ndpy

PORT = 7471
REQUEST = struct.Struct("!I")  # size of the messages, in network order
PATTERN = bytes(range(256))


def message(number, size, sender):
    """The message `number` of this sender. Each byte differs from the other sender's."""
    start = number % 251 + (128 if sender == "server" else 0)
    return (PATTERN * (size // 256 + 3))[start : start + size]


class Endpoint:
    """A queue pair with one buffer to send from and one to receive into."""

    def __init__(self, adapter, size, stack):
        self.outbox = bytearray(size)
        self.inbox = bytearray(size)
        # The stack closes in reverse order: first the queue pair, then its completion queues and its memory.
        self.out_region = stack.enter_context(adapter.register(self.outbox, ndpy.Access.NONE))
        self.in_region = stack.enter_context(adapter.register(self.inbox, ndpy.Access.LOCAL_WRITE))
        self.received = stack.enter_context(adapter.create_completion_queue(4))
        self.sent = stack.enter_context(adapter.create_completion_queue(4))
        self.queue_pair = stack.enter_context(
            adapter.create_queue_pair(self.received, self.sent, receive_queue_depth=2, initiator_queue_depth=2)
        )

    def expect_message(self):
        """Post a receive into the inbox. Call this before the peer can send."""
        self.queue_pair.receive(self.in_region)

    def send(self, data):
        """Send one message. The outbox may be changed again when the send has completed."""
        self.outbox[:] = data
        self.queue_pair.send(self.out_region)

    def wait_sent(self, timeout_s):
        """Wait until the message was sent. Returns False if the peer disconnected."""
        (completion,) = self.sent.wait(timeout_s)
        if completion.status is ndpy.Status.CANCELED:
            return False
        completion.raise_for_status()
        return True

    def wait_message(self, timeout_s):
        """Wait for the next message and return its bytes, or None if the peer disconnected."""
        (completion,) = self.received.wait(timeout_s)
        if completion.status is ndpy.Status.CANCELED:
            return None
        completion.raise_for_status()
        return self.inbox[: completion.nbytes]


def run_server(adapter, args):
    with ExitStack() as stack:
        listener = stack.enter_context(adapter.listen(("", args.port)))
        host, port = listener.address[:2]
        print(f"listening on {host} port {port}", flush=True)

        connector = stack.enter_context(listener.get_request())  # waits for ever; Ctrl-C ends it
        # A transport may append zero bytes to private data, so read only the bytes of the protocol.
        (size,) = REQUEST.unpack_from(connector.private_data)
        if not 1 <= size <= args.max_size:
            connector.reject()
            sys.exit(f"pingpong: the client asked for {size} bytes a message; allowed are 1 to {args.max_size}")
        end = Endpoint(adapter, size, stack)
        end.expect_message()
        connector.accept(end.queue_pair, timeout_s=args.timeout)

        number = 0
        while (data := end.wait_message(args.timeout)) is not None:
            if data != message(number, size, "client"):
                sys.exit(f"pingpong: message {number} arrived damaged")
            end.expect_message()
            end.send(message(number, size, "server"))
            number += 1
            # A client may take the last answer and leave before its adapter has acknowledged it (iWARP).
            if not end.wait_sent(args.timeout):
                break
    print(f"verified {number} messages of {size} bytes; the client has disconnected")


def run_client(adapter, args):
    times_us = []
    with ExitStack() as stack:
        end = Endpoint(adapter, args.size, stack)
        connector = stack.enter_context(
            adapter.connect(
                end.queue_pair,
                (args.host, args.port),
                private_data=REQUEST.pack(args.size),
                timeout_s=args.timeout,
            )
        )
        for number in range(args.count):
            ping, pong = (message(number, args.size, sender) for sender in ("client", "server"))
            end.expect_message()
            start = time.perf_counter_ns()
            end.send(ping)
            data = end.wait_message(args.timeout)
            times_us.append((time.perf_counter_ns() - start) / 1000)
            if not end.wait_sent(args.timeout) or data is None:
                sys.exit(f"pingpong: the server disconnected at message {number}")
            if data != pong:
                sys.exit(f"pingpong: the answer to message {number} arrived damaged")
        connector.disconnect(timeout_s=args.timeout)
    times_us.sort()
    print(f"verified {args.count} round trips of {args.size} bytes")
    print(
        f"round trip in us: least {times_us[0]:.1f}, median {statistics.median(times_us):.1f}, "
        f"99 % {times_us[(len(times_us) * 99 - 1) // 100]:.1f}, most {times_us[-1]:.1f}"
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
    server = roles.add_parser("server", parents=[common], help="serve one client, then stop")
    server.add_argument("--max-size", type=positive, default=1 << 24, metavar="BYTES", help="refuse larger messages")
    client = roles.add_parser("client", parents=[common], help="connect to a server and time the round trips")
    client.add_argument("host")
    client.add_argument("--size", type=positive, default=64, metavar="BYTES", help="default: %(default)s")
    client.add_argument("--count", type=positive, default=1000, help="number of round trips; default: %(default)s")
    args = parser.parse_args()
    with ndpy.open_adapter(args.adapter) as adapter:
        (run_server if args.role == "server" else run_client)(adapter, args)


if __name__ == "__main__":
    try:
        main()
    except (ndpy.NdpyError, OSError) as error:
        sys.exit(f"pingpong: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
