"""Speaks the protocol of ibv_rc_pingpong. The other end may be ibv_rc_pingpong of ibverbs-utils, or ibv_uc_pingpong
or ibv_ud_pingpong.

    python rc_pingpong.py                       ibv_rc_pingpong -g 1 192.0.2.1
    ibv_rc_pingpong -g 1                        python rc_pingpong.py 192.0.2.1
    ibv_uc_pingpong -g 1                        python rc_pingpong.py -t UC 192.0.2.1
    ibv_ud_pingpong -g 1                        python rc_pingpong.py -t UD -s 2048 192.0.2.1

It uses no connection manager. The ends exchange the addresses of their queue pairs over TCP (port 18515):

    1. The client sends 52 bytes: "LID:QPN:PSN:GID" with 4, 6, 6 and 32 hexadecimal digits, and a zero byte.
    2. The server connects its queue pair and sends its own 52 bytes.
    3. The client connects its queue pair and sends "done" and a zero byte.

Then the client sends a message. Each side answers each message with the same bytes. Both stop after the number
of messages that -n gives. This works on InfiniBand, RoCE and soft0. Other iWARP adapters need a connection manager.

The GID is the best one by rank: RoCE v2 before v1, routable before link-local. -g selects another one by its
index. The path MTU is not exchanged, so both ends need the same -m.
"""

import argparse
import dataclasses
import socket
import sys
import time
from contextlib import ExitStack

import ndpy

PORT = 18515
EXCHANGE_LENGTH = 52
DONE = b"done\0"
PAGE = 4096
RECEIVES_AT_ONCE = 2


def to_wire(endpoint):
    text = f"{endpoint.lid:04x}:{endpoint.qp_number:06x}:{endpoint.psn:06x}:{endpoint.gid.hex()}"
    return text.encode() + b"\0"


def from_wire(data, local, mtu):
    """Parse the peer's endpoint. Properties that are not exchanged are assumed to be those of this side."""
    try:
        lid, qp_number, psn, gid = data.rstrip(b"\0").decode().split(":")
        lid, qp_number, psn, gid = int(lid, 16), int(qp_number, 16), int(psn, 16), bytes.fromhex(gid)
    except ValueError:
        sys.exit(f"rc_pingpong: the peer sent {data!r}, which is not LID:QPN:PSN:GID")
    transport = local.gid_type.partition(" ")[0]
    if not any(gid) and transport in ("RoCE", "iWARP"):
        sys.exit(f"rc_pingpong: the peer sent no GID, and {transport} cannot do without: start it with -g INDEX")
    remote = dataclasses.replace(local, lid=lid, qp_number=qp_number, psn=psn, gid=gid, mtu=mtu)
    return dataclasses.replace(remote, inbound_read_limit=None)


def describe(which, endpoint):
    numbers = f"LID {endpoint.lid:#06x}, QPN {endpoint.qp_number:#08x}, PSN {endpoint.psn:#08x}"
    print(f"  {which} address: {numbers}, GID {socket.inet_ntop(socket.AF_INET6, endpoint.gid)}", flush=True)


def receive_exactly(connection, length):
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            sys.exit("rc_pingpong: the peer closed the connection in the middle of the exchange")
        data += part
    return data


def make_queue_pair(adapter, received, sent, kind):
    if kind is ndpy.QueuePairType.UD:
        return adapter.create_datagram_queue_pair(received, sent, qkey=0x11111111)
    return adapter.create_queue_pair(received, sent, type=kind)


def connect(queue_pair, remote, stack):
    """Returns the function that sends a region to the peer."""
    if queue_pair.type is ndpy.QueuePairType.UD:
        there = stack.enter_context(queue_pair.destination(remote))
        return lambda region: queue_pair.send(region, there)
    queue_pair.connect_endpoint(remote)
    return queue_pair.send


def connect_as_server(queue_pair, local, args, stack):
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    with socket.create_server(("", args.port), family=family, dualstack_ipv6=dual) as listener:
        print(f"listening on TCP port {listener.getsockname()[1]}", flush=True)
        connection, _ = listener.accept()  # waits for ever; Ctrl-C ends it
    with connection:
        connection.settimeout(args.timeout)
        remote = from_wire(receive_exactly(connection, EXCHANGE_LENGTH), local, args.mtu)
        send = connect(queue_pair, remote, stack)
        connection.sendall(to_wire(local))
        receive_exactly(connection, len(DONE))
    return remote, send


def connect_as_client(queue_pair, local, args, stack):
    try:
        connection = socket.create_connection((args.host, args.port), timeout=args.timeout)
    except OSError as error:
        sys.exit(
            f"rc_pingpong: {args.host} TCP port {args.port}: {error.strerror or error}; "
            "check the address, the network, and that a server listens there"
        )
    with connection:
        connection.sendall(to_wire(local))
        remote = from_wire(receive_exactly(connection, EXCHANGE_LENGTH), local, args.mtu)
        send = connect(queue_pair, remote, stack)
        connection.sendall(DONE)
    return remote, send


def pattern(size):
    """Bytes that differ from their neighbours, with 0 at the start of each page, which ibv_rc_pingpong -c checks."""
    data = bytearray((bytes(range(1, 252)) * (size // 251 + 1))[:size])
    data[::PAGE] = bytes(len(range(0, size, PAGE)))
    return bytes(data)


def run(adapter, args):
    is_client = args.host is not None
    with ExitStack() as stack:
        inbox, outbox = bytearray(args.size), bytearray(args.size)
        in_region = stack.enter_context(adapter.register(inbox, ndpy.Access.LOCAL_WRITE))
        out_region = stack.enter_context(adapter.register(outbox, ndpy.Access.NONE))
        received = stack.enter_context(adapter.create_completion_queue(RECEIVES_AT_ONCE + 1))
        sent = stack.enter_context(adapter.create_completion_queue(2))
        destinations = stack.enter_context(ExitStack())
        queue_pair = stack.enter_context(make_queue_pair(adapter, received, sent, ndpy.QueuePairType[args.type]))
        queue_pair.receive(in_region)

        try:
            local = queue_pair.local_endpoint(gid_index=args.gid_index)
        except ndpy.UnsupportedError:
            name, transport = adapter.info.name, adapter.info.transport
            sys.exit(f"rc_pingpong: {name} ({transport}) cannot connect without a connection manager; try pingpong.py")
        describe("local", local)
        connect_as = connect_as_client if is_client else connect_as_server
        remote, send = connect_as(queue_pair, local, args, destinations)
        describe("remote", remote)

        expected = pattern(args.size) if is_client else None
        start = time.perf_counter()
        for number in range(args.iterations):
            if is_client:
                outbox[:] = expected
                send(out_region)
                finish(sent, args)
            finish(received, args)
            # The server can only check the marks at the page starts of the first message, with -c.
            if expected is None:
                expected = bytes(inbox)
                if args.check and any(expected[::PAGE]):
                    sys.exit("rc_pingpong: the first message lacks the marks that a client with -c makes")
            if inbox != expected:
                sys.exit(f"rc_pingpong: message {number} arrived damaged")
            inbox[:] = bytes(args.size)
            if number + 1 < args.iterations:
                queue_pair.receive(in_region)
            if not is_client:
                outbox[:] = expected
                send(out_region)
                finish(sent, args)
        seconds = time.perf_counter() - start
    each_us = seconds / args.iterations * 1e6
    print(f"{args.iterations} iters of {args.size} bytes verified, {each_us:.2f} usec/iter")


def finish(queue, args):
    (completion,) = queue.wait(args.timeout)
    completion.raise_for_status()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("host", nargs="?", help="address of the server; without it, this is the server")
    parser.add_argument("-p", dest="port", type=int, default=PORT, help="TCP port; default: %(default)s")
    parser.add_argument("-d", dest="adapter", help="name of the adapter; default: the first active one")
    parser.add_argument("-s", dest="size", type=int, default=4096, help="bytes in a message; default: %(default)s")
    parser.add_argument(
        "-n", dest="iterations", type=int, default=1000, help="number of messages; default: %(default)s"
    )
    parser.add_argument("-m", dest="mtu", type=int, choices=(256, 512, 1024, 2048, 4096), default=1024, help="path MTU")
    parser.add_argument(
        "-t",
        dest="type",
        choices=[kind.name for kind in ndpy.QueuePairType],
        default="RC",
        help="type of the queue pairs, on both sides; default: %(default)s",
    )
    parser.add_argument("-g", dest="gid_index", type=int, help="GID index; default: the best GID by rank")
    parser.add_argument(
        "-c", dest="check", action="store_true", help="server: check the marks of a client that also has -c"
    )
    parser.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    args = parser.parse_args()
    if args.size < 1 or args.iterations < 1:
        parser.error("-s and -n are 1 or more")
    with ndpy.open_adapter(args.adapter) as adapter:
        run(adapter, args)


if __name__ == "__main__":
    try:
        main()
    except (ndpy.NdpyError, OSError) as error:
        sys.exit(f"rc_pingpong: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
