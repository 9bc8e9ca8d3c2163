"""An end of ibv_rc_pingpong's conversation with pyverbs. See pingpong_line.py."""

from __future__ import annotations

import time

import pingpong_line
import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

PORT = 1
PSN = 0x123456


class _Half:
    """One half of a region, which pyverbs reads and writes by calls."""

    def __init__(self, region, offset, size):
        self.region, self.offset, self.size = region, offset, size

    def __bytes__(self):
        return bytes(self.region.read(self.size, self.offset))

    def __eq__(self, other):
        return bytes(self) == bytes(other)

    def __setitem__(self, place, data):
        """place: a slice that begins at 0."""
        written = bytes(data)
        self.region.write(written, len(written), self.offset)


class End:
    #: The rights of the peer.
    access = e.IBV_ACCESS_LOCAL_WRITE

    def __init__(self, options):
        self._gid_index, self._limit_s = options.gid, options.limit
        self._context = Context(name=options.device)
        pd = PD(self._context)
        self._queue = CQ(self._context, 8)
        self._region = MR(pd, 2 * options.size, self.access)
        cap = QPCap(max_send_wr=2, max_recv_wr=2, max_send_sge=1, max_recv_sge=1)
        made = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self._queue, rcq=self._queue, cap=cap, sq_sig_all=1)
        self._queue_pair = QP(pd, made)
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = self.access
        self._queue_pair.to_init(attributes)
        self.number, self.psn = self._queue_pair.qp_num, PSN
        self.gid = bytes.fromhex(self._context.query_gid(PORT, options.gid).gid.replace(":", ""))
        self.outbox = _Half(self._region, 0, options.size)
        self.inbox = _Half(self._region, options.size, options.size)
        self._out = SGE(self._region.buf, options.size, self._region.lkey)
        self._in = SGE(self._region.buf + options.size, options.size, self._region.lkey)

    def connect(self, number, psn, gid):
        route = GlobalRoute(dgid=GID(":".join(gid[at : at + 2].hex() for at in range(0, 16, 2))), hop_limit=64)
        route.sgid_index = self._gid_index
        attributes = QPAttr(port_num=PORT)
        attributes.qp_access_flags = self.access
        attributes.path_mtu = e.IBV_MTU_1024
        attributes.dest_qp_num, attributes.rq_psn, attributes.sq_psn = number, psn, PSN
        attributes.max_rd_atomic = attributes.max_dest_rd_atomic = 1
        attributes.min_rnr_timer, attributes.timeout = 12, 14
        attributes.retry_cnt, attributes.rnr_retry = 6, 7
        attributes.ah_attr = AHAttr(is_global=1, port_num=PORT, gr=route)
        self._queue_pair.to_rtr(attributes)
        self._queue_pair.to_rts(attributes)

    def post_receive(self):
        self._queue_pair.post_recv(RecvWR(num_sge=1, sg=[self._in]))

    def post_send(self):
        self._queue_pair.post_send(
            SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[self._out], send_flags=e.IBV_SEND_SIGNALED)
        )

    def take(self):
        """The next completion."""
        deadline = time.monotonic() + self._limit_s
        while not (taken := self._queue.poll())[0]:
            if time.monotonic() > deadline:
                raise SystemExit("nothing completed")
        return taken[1][0]

    def finish(self):
        completion = self.take()
        if completion.status != e.IBV_WC_SUCCESS:
            raise SystemExit(f"a request failed: {completion}")


if __name__ == "__main__":
    arguments = pingpong_line.arguments()
    pingpong_line.run(End(arguments), arguments)
