"""The loops of `make bench` with pyverbs, the Python bindings of rdma-core.

python loops_pyverbs.py DEVICE: prints a line of JSON for each loop. See timing.py and loops.c.
"""

import itertools
import platform
import sys

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from timing import BATCH, CONTEXT, GID_INDEX, LENGTH, PAGE, PORT, RECEIVES, measure, pages

LOOPS = {
    "write_afresh": """
        request = SendWR(wr_id=7, opcode=WRITE, num_sge=1, sg=[SGE(address, 8, lkey)], send_flags=SIGNALED)
        request.set_wr_rdma(rkey, remote_address)
        post(request)
        while not poll()[0]:
            empty.append(0)
    """,
    "write_kept": """
        post(kept)
        while not poll()[0]:
            empty.append(0)
    """,
    "write_64_calls": """
        for _ in range(63):
            post(silent)
        post(kept)
        while not poll()[0]:
            empty.append(0)
    """,
    "write_64_list": """
        post(first_write)
        while not poll()[0]:
            empty.append(0)
    """,
    "poll_empty": "poll()",
    "poll_module": "count, found = queue.poll(1)",
    "register_4k": "MR(pd, 4096, LOCAL_WRITE, address=page).close()",
    "receive_64_list": "post_receive(first_receive)",
    "poll_64": "poll_receives(64)",
    "poll_64_looked_at": """
        for completion in poll_receives(64)[1]:
            completion.wr_id
            completion.status
    """,
}

# Plain integers: to convert a member of an enumeration costs a call.
WRITE, SEND = int(e.IBV_WR_RDMA_WRITE), int(e.IBV_WR_SEND)
SIGNALED = int(e.IBV_SEND_SIGNALED)
LOCAL_WRITE = int(e.IBV_ACCESS_LOCAL_WRITE)
BOTH = LOCAL_WRITE | int(e.IBV_ACCESS_REMOTE_WRITE)


def prepare(name):
    """Two connected queue pairs, and what the loops use of them."""
    context = Context(name=name)
    pd = PD(context)
    queue, receive_queue = CQ(context, 2 * BATCH), CQ(context, RECEIVES)
    memory, address = pages(3)
    region = MR(pd, PAGE, LOCAL_WRITE, address=address)
    target = MR(pd, PAGE, BOTH, address=address + PAGE)

    def create(receives_to, send_depth, receive_depth):
        cap = QPCap(max_send_wr=send_depth, max_recv_wr=receive_depth, max_send_sge=1, max_recv_sge=1)
        return QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=queue, rcq=receives_to, cap=cap))

    def connect(queue_pair, peer):
        route = GlobalRoute(dgid=context.query_gid(PORT, GID_INDEX), sgid_index=GID_INDEX, hop_limit=64)
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = BOTH
        attributes.path_mtu = context.query_port(PORT).active_mtu
        attributes.dest_qp_num = peer.qp_num
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.timeout = 12, 14
        attributes.retry_cnt = attributes.rnr_retry = 7
        attributes.ah_attr = AHAttr(is_global=1, port_num=PORT, gr=route)
        queue_pair.to_rts(attributes)

    client, server = create(queue, 2 * BATCH, 1), create(receive_queue, 1, RECEIVES)
    connect(client, server)
    connect(server, client)
    element, landing = SGE(address, LENGTH, region.lkey), SGE(address + PAGE, LENGTH, target.lkey)

    def request(opcode, flags):
        made = SendWR(wr_id=CONTEXT, opcode=opcode, num_sge=1, sg=[element], send_flags=flags)
        made.set_wr_rdma(target.rkey, address + PAGE)
        return made

    def chain(requests):
        for one, following in itertools.pairwise(requests):
            one.next_wr = following
        return requests

    def requests(opcode):
        """One batch, of which the last is signalled."""
        return chain([request(opcode, 0) for _ in range(BATCH - 1)] + [request(opcode, SIGNALED)])

    kept = request(WRITE, SIGNALED)
    writes, sends = requests(WRITE), requests(SEND)
    receives = chain([RecvWR(wr_id=CONTEXT, num_sge=1, sg=[landing]) for _ in range(BATCH)])

    def succeeded(completions):
        for completion in completions:
            if completion.status != e.IBV_WC_SUCCESS:
                raise RuntimeError(f"a request failed:\n{completion}")

    def take_one():
        while not (taken := queue.poll())[0]:
            pass
        succeeded(taken[1])

    def check():
        client.post_send(kept)
        take_one()

    def post_receives():
        for _ in range(RECEIVES // BATCH):
            server.post_recv(receives[0])

    def deliver():
        for _ in range(RECEIVES // BATCH):
            client.post_send(sends[0])
            take_one()

    def drain():
        count = 0
        while (taken := receive_queue.poll(BATCH))[0]:
            succeeded(taken[1])
            count += taken[0]
        return count

    return {
        "post": client.post_send,
        "post_receive": server.post_recv,
        "queue": queue,
        "poll": queue.poll,
        "poll_receives": receive_queue.poll,
        "MR": MR,
        "SGE": SGE,
        "SendWR": SendWR,
        "WRITE": WRITE,
        "SIGNALED": SIGNALED,
        "LOCAL_WRITE": LOCAL_WRITE,
        "pd": pd,
        "address": address,
        "lkey": region.lkey,
        "remote_address": address + PAGE,
        "rkey": target.rkey,
        "page": address + 2 * PAGE,
        "kept": kept,
        "silent": request(WRITE, 0),
        "first_write": writes[0],
        "first_receive": receives[0],
        "empty": [],
        "check": check,
        "post_receives": post_receives,
        "deliver": deliver,
        "drain": drain,
        # A request keeps neither the next one nor its regions, and a region does not keep its memory.
        "kept_alive": (memory, region, target, writes, receives),
    }


if __name__ == "__main__":
    measure("pyverbs", {"python": platform.python_version()}, LOOPS, prepare(sys.argv[1]))
