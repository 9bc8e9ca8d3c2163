"""A server with many clients on one completion queue, in one thread.

    python many_clients.py server
    python many_clients.py client 192.0.2.1 --connections 8 --messages 100

Each client sends numbers. The server answers each number with the running total of that client. The messages
of all clients arrive in one set of slots: in a shared receive queue if the adapter has them, else in a few slots
for each client. A slot is posted as a receive, or holds an answer that is being sent, or is free.
"""

import argparse
import queue
import struct
import sys
from contextlib import ExitStack
from dataclasses import dataclass

import ndpy

PORT = 7473
NUMBER = struct.Struct("!Q")
SLOTS_PER_CLIENT = 2


@dataclass
class Client:
    """What the server knows about one client."""

    name: str
    connector: ndpy.Connector
    queue_pair: ndpy.QueuePair
    total: int = 0


class Server:
    def __init__(self, adapter, args, stack):
        self.adapter, self.timeout_s = adapter, args.timeout
        self.clients = {}  # by queue pair, because a completion names its queue pair
        self.served = 0
        self.events = queue.SimpleQueue()  # handlers that other threads pass to run()
        self.free_slots = list(range(args.slots))

        self.memory = bytearray(args.slots * NUMBER.size)
        self.region = stack.enter_context(adapter.register(self.memory, ndpy.Access.LOCAL_WRITE))
        self.poller = stack.enter_context(ndpy.Poller())
        # A slot has at most one outstanding request, so the queue cannot overrun.
        self.completions = stack.enter_context(adapter.create_completion_queue(args.slots))
        self.poller.add(self.completions)
        self.shared = None
        if ndpy.Capability.SHARED_RECEIVE_QUEUES in adapter.info.capabilities:
            self.shared = stack.enter_context(adapter.create_shared_receive_queue(args.slots))
            self.offer_slots(self.shared, args.slots)
        stack.callback(self.drop_everybody)
        self.listener = stack.enter_context(adapter.listen(("", args.port)))
        self.expect_request()

    def element(self, slot):
        return self.region[slot * NUMBER.size : (slot + 1) * NUMBER.size]

    def offer_slots(self, receiver, count):
        for _ in range(count):
            slot = self.free_slots.pop()
            receiver.receive(self.element(slot), context=slot)

    def run(self, until):
        """Serve for ever, or until this many clients have left."""
        while until is None or self.served < until:
            for _, completions in self.poller.wait():
                for completion in completions:
                    self.handle(completion)
            while not self.events.empty():
                handler, argument = self.events.get()
                handler(argument)

    def call_in_run(self, pending, handler, argument):
        """Let run() call handler(argument) when `pending` is done."""

        def done(_):
            self.events.put((handler, argument))
            self.poller.wake()

        pending.add_done_callback(done)

    def expect_request(self):
        pending = self.listener.begin_get_request()
        self.call_in_run(pending, self.welcome, pending)

    def welcome(self, request):
        connector = request.result()
        self.expect_request()
        host, port = connector.peer_address[:2]
        if not self.shared and len(self.free_slots) < SLOTS_PER_CLIENT:
            connector.reject()
            connector.close()
            return
        depth = SLOTS_PER_CLIENT
        queue_pair = self.adapter.create_queue_pair(
            self.completions, receive_queue_depth=depth, initiator_queue_depth=depth, srq=self.shared
        )
        client = self.clients[queue_pair] = Client(f"{host} port {port}", connector, queue_pair)
        if not self.shared:
            self.offer_slots(queue_pair, SLOTS_PER_CLIENT)
        print(f"{client.name} came", flush=True)
        try:
            connector.accept(queue_pair, timeout_s=self.timeout_s)
        except ndpy.ProviderError as error:
            self.drop(client, error)
        else:
            self.call_in_run(connector.begin_wait_disconnected(), self.drop, client)

    def handle(self, completion):
        client = self.clients.get(completion.queue_pair)
        if client and not completion.ok:
            self.drop(client, None if completion.status is ndpy.Status.CANCELED else completion.status.name)
        elif client and completion.operation is ndpy.Operation.RECEIVE:
            try:
                self.answer(client, completion.context)
                return
            except ndpy.NdpyError as error:
                self.drop(client, error)
        self.reuse(completion.context, client)

    def answer(self, client, slot):
        (number,) = NUMBER.unpack_from(self.memory, slot * NUMBER.size)
        client.total = (client.total + number) % 2**64
        NUMBER.pack_into(self.memory, slot * NUMBER.size, client.total)
        client.queue_pair.send(self.element(slot), context=slot)

    def reuse(self, slot, client):
        """Post the slot of a completed request again, or keep it for another client."""
        self.free_slots.append(slot)
        if self.shared:
            self.offer_slots(self.shared, 1)
        elif client and client.queue_pair in self.clients:
            self.offer_slots(client.queue_pair, 1)

    def drop(self, client, error=None):
        if self.clients.pop(client.queue_pair, None):
            client.connector.close()
            client.queue_pair.close()
            self.served += 1
            how = f"failed ({error})" if error else "left"
            print(f"{client.name} {how}, total {client.total}", flush=True)

    def drop_everybody(self):
        for client in list(self.clients.values()):
            self.drop(client, "the server ended")


def run_server(adapter, args):
    with ExitStack() as stack:
        server = Server(adapter, args, stack)
        kind = "a shared receive queue" if server.shared else "receives for each client"
        host, port = server.listener.address[:2]
        print(f"listening on {host} port {port}, with {kind}", flush=True)
        server.run(args.until)


class Connection:
    """The client's end of one connection. It sends numbers, one at a time, and checks each running total."""

    def __init__(self, adapter, args, seed, stack):
        self.seed, self.expected, self.timeout_s = seed, 0, args.timeout
        self.number, self.total = bytearray(NUMBER.size), bytearray(NUMBER.size)
        self.number_region = stack.enter_context(adapter.register(self.number, ndpy.Access.NONE))
        self.total_region = stack.enter_context(adapter.register(self.total, ndpy.Access.LOCAL_WRITE))
        self.completions = stack.enter_context(adapter.create_completion_queue(2))
        self.queue_pair = stack.enter_context(adapter.create_queue_pair(self.completions))
        address = (args.host, args.port)
        self.connector = stack.enter_context(adapter.connect(self.queue_pair, address, timeout_s=args.timeout))

    def ask(self, number):
        NUMBER.pack_into(self.number, 0, number)
        self.expected += number
        self.queue_pair.receive(self.total_region)
        self.queue_pair.send(self.number_region)

    def check(self):
        ended = 0
        while ended < 2:  # the send and the receive
            for completion in self.completions.wait(self.timeout_s):
                completion.raise_for_status()
                ended += 1
        (total,) = NUMBER.unpack(self.total)
        if total != self.expected:
            raise RuntimeError(f"connection {self.seed}: the server says {total}, it is {self.expected}")


def run_client(adapter, args):
    with ExitStack() as stack:
        connections = [Connection(adapter, args, seed, stack) for seed in range(args.connections)]
        for i in range(args.messages):
            for connection in connections:
                connection.ask(connection.seed * 1000 + i)
            for connection in connections:
                connection.check()
        for connection in connections:
            connection.connector.disconnect(timeout_s=args.timeout)
    print(f"verified {args.messages} answers on each of {args.connections} connections")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--adapter", help="name or local IP address; default: the first active adapter")
    common.add_argument("--port", type=int, default=PORT, help="default: %(default)s")
    common.add_argument("--timeout", type=float, default=10, metavar="SECONDS", help="time limit of each step")
    roles = parser.add_subparsers(dest="role", required=True)
    server = roles.add_parser("server", parents=[common], help="serve until Ctrl-C")
    server.add_argument("--slots", type=int, default=128, help="number of message slots; default: %(default)s")
    server.add_argument("--until", type=int, metavar="N", help="stop after N clients have left")
    client = roles.add_parser("client", parents=[common], help="open connections and send numbers")
    client.add_argument("host")
    client.add_argument("--connections", type=int, default=4, help="default: %(default)s")
    client.add_argument("--messages", type=int, default=100, help="messages on each connection; default: %(default)s")
    args = parser.parse_args()
    with ndpy.open_adapter(args.adapter) as adapter:
        (run_server if args.role == "server" else run_client)(adapter, args)


if __name__ == "__main__":
    try:
        main()
    except (ndpy.NdpyError, OSError, RuntimeError) as error:
        sys.exit(f"many_clients: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
