"""The loops of `make bench` with ibverbs, PyPI's bindings of that name (rdma4py).

python loops_ibverbs.py DEVICE: prints a line of JSON for each loop. See timing.py and loops.c.
"""

import platform
import sys

import ibverbs as ib
from ibverbs import SGE, RecvWR, SendWR
from timing import BATCH, CONTEXT, GID_INDEX, LENGTH, PAGE, PORT, RECEIVES, measure, pages

LOOPS = {
    "write_afresh": """
        post(SendWR(
            wr_id=7, sg_list=[SGE(region, 8)], opcode=WRITE, send_flags=SIGNALED, remote_addr=remote_address, rkey=rkey
        ))
        while not poll(1):
            empty.append(0)
    """,
    "write_kept": """
        post(kept)
        while not poll(1):
            empty.append(0)
    """,
    "write_64_calls": """
        for _ in range(63):
            post(silent)
        post(kept)
        while not poll(1):
            empty.append(0)
    """,
    "write_64_list": """
        post(writes)
        while not poll(1):
            empty.append(0)
    """,
    "poll_empty": "poll(1)",
    "register_4k": "register(page, 4096, LOCAL_WRITE).close()",
    "receive_64_list": "post_receive(receives)",
    "poll_64": "poll_receives(64)",
    "poll_64_looked_at": """
        for completion in poll_receives(64):
            completion.wr_id
            completion.status
    """,
}

# Plain integers: to convert a member of an enumeration costs a call.
WRITE, SEND = int(ib.WROpcode.RDMA_WRITE), int(ib.WROpcode.SEND)
SIGNALED = int(ib.SendFlags.SIGNALED)
LOCAL_WRITE = int(ib.AccessFlags.LOCAL_WRITE)
BOTH = LOCAL_WRITE | int(ib.AccessFlags.REMOTE_WRITE)


def prepare(name):
    """Two connected queue pairs, and what the loops use of them."""
    context = next(device for device in ib.get_device_list() if device.name == name).open()
    pd = context.alloc_pd()
    queue, receive_queue = context.create_cq(2 * BATCH), context.create_cq(RECEIVES)
    memory, address = pages(3)
    region = pd.reg_mr(address, PAGE, LOCAL_WRITE)
    target = pd.reg_mr(address + PAGE, PAGE, BOTH)

    def create(receives_to, send_depth, receive_depth):
        attributes = ib.QPInitAttr(
            send_cq=queue, recv_cq=receives_to, max_send_wr=send_depth, max_recv_wr=receive_depth
        )
        return pd.create_qp(attributes)

    def connect(queue_pair, peer):
        gid = context.query_gid(PORT, GID_INDEX)
        information = ib.local_qp_info(peer, context.query_port(PORT), gid, port=PORT)
        ib.connect_rc(queue_pair, information, port=PORT, sgid_index=GID_INDEX, access=BOTH)

    client, server = create(queue, 2 * BATCH, 1), create(receive_queue, 1, RECEIVES)
    connect(client, server)
    connect(server, client)

    def request(opcode, flags):
        return SendWR(
            wr_id=CONTEXT,
            sg_list=[SGE(region, LENGTH)],
            opcode=opcode,
            send_flags=flags,
            remote_addr=address + PAGE,
            rkey=target.rkey,
        )

    kept = request(WRITE, SIGNALED)
    sends = [request(SEND, 0) for _ in range(BATCH - 1)] + [request(SEND, SIGNALED)]
    receives = [RecvWR(wr_id=CONTEXT, sg_list=[SGE(target, LENGTH)]) for _ in range(BATCH)]

    def take_one():
        while not (taken := queue.poll(1)):
            pass
        taken[0].raise_for_status()

    def check():
        client.post_send(kept)
        take_one()

    def post_receives():
        for _ in range(RECEIVES // BATCH):
            server.post_recv(receives)

    def deliver():
        for _ in range(RECEIVES // BATCH):
            client.post_send(sends)
            take_one()

    def drain():
        count = 0
        while taken := receive_queue.poll(BATCH):
            taken[-1].raise_for_status()
            count += len(taken)
        return count

    return {
        "post": client.post_send,
        "post_receive": server.post_recv,
        "poll": queue.poll,
        "poll_receives": receive_queue.poll,
        "register": pd.reg_mr,
        "SGE": SGE,
        "SendWR": SendWR,
        "WRITE": WRITE,
        "SIGNALED": SIGNALED,
        "LOCAL_WRITE": LOCAL_WRITE,
        "region": region,
        "remote_address": address + PAGE,
        "rkey": target.rkey,
        "page": address + 2 * PAGE,
        "kept": kept,
        "silent": request(WRITE, 0),
        "writes": [request(WRITE, 0) for _ in range(BATCH - 1)] + [kept],
        "receives": receives,
        "empty": [],
        "check": check,
        "post_receives": post_receives,
        "deliver": deliver,
        "drain": drain,
        # A region does not keep its memory.
        "kept_alive": (memory, target),
    }


if __name__ == "__main__":
    about = {"version": ib.__version__, "python": platform.python_version()}
    measure("ibverbs", about, LOOPS, prepare(sys.argv[1]))
