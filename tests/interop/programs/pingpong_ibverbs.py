"""An end of ibv_rc_pingpong's conversation with PyPI's ibverbs (rdma4py). See pingpong_line.py."""

from __future__ import annotations

import ctypes
import time

import ibverbs as ib
import pingpong_line

PORT = 1
PSN = 0x654321
MTU_1024 = 3


class End:
    #: The rights of the peer.
    access = ib.AccessFlags.LOCAL_WRITE

    def __init__(self, options):
        self._gid_index, self._limit_s = options.gid, options.limit
        context = next(device for device in ib.get_device_list() if device.name == options.device).open()
        pd = context.alloc_pd()
        self._queue = context.create_cq(8)
        self._memory = ctypes.create_string_buffer(2 * options.size)
        self._address, self._size = ctypes.addressof(self._memory), options.size
        self._region = pd.reg_mr(self._address, 2 * options.size, int(self.access))
        made = ib.QPInitAttr(send_cq=self._queue, recv_cq=self._queue, max_send_wr=2, max_recv_wr=2)
        self._queue_pair = pd.create_qp(made)
        self._queue_pair.to_init(PORT, int(self.access))
        self.number, self.psn = self._queue_pair.qp_num, PSN
        self.gid = bytes(context.query_gid(PORT, options.gid).raw)
        both = memoryview(self._memory).cast("B")
        self.outbox, self.inbox = both[: options.size], both[options.size :]

    def connect(self, number, psn, gid):
        peer = ib.QPInfo(qp_num=number, psn=psn, lid=0, gid=gid, port=PORT, mtu=MTU_1024)
        self._queue_pair.to_rtr(peer, sgid_index=self._gid_index, mtu=MTU_1024)
        self._queue_pair.to_rts(PSN, retry_cnt=6)

    def post_receive(self):
        self._queue_pair.post_recv(ib.RecvWR(sg_list=[ib.SGE(self._region, self._size, offset=self._size)]))

    def post_send(self):
        flags = int(ib.SendFlags.SIGNALED)
        request = ib.SendWR(sg_list=[ib.SGE(self._region, self._size)], opcode=int(ib.WROpcode.SEND), send_flags=flags)
        self._queue_pair.post_send(request)

    def take(self):
        """The next completion."""
        deadline = time.monotonic() + self._limit_s
        while not (taken := self._queue.poll(1)):
            if time.monotonic() > deadline:
                raise SystemExit("nothing completed")
        return taken[0]

    def finish(self):
        self.take().raise_for_status()


if __name__ == "__main__":
    arguments = pingpong_line.arguments()
    pingpong_line.run(End(arguments), arguments)
