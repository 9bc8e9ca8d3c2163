"""The end of operations_line.py with pyverbs."""

from __future__ import annotations

import socket

import operations_line
import pyverbs.enums as e
from pingpong_pyverbs import End
from pyverbs.wr import SGE, RecvWR, SendWR

OPCODES = {
    "write": e.IBV_WR_RDMA_WRITE_WITH_IMM,
    "send": e.IBV_WR_SEND_WITH_IMM,
    "fetch_and_add": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
    "compare_and_swap": e.IBV_WR_ATOMIC_CMP_AND_SWP,
}


class Operating(End):
    access = (
        e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC
    )

    @property
    def place(self):
        return self._region.buf, self._region.rkey

    def receive(self):
        self._queue_pair.post_recv(RecvWR(num_sge=1, sg=[self._in]))

    def take_any(self):
        taken = self.take()
        return taken.opcode, taken.status, taken.byte_len, socket.ntohl(taken.imm_data)

    def _request(self, word, length, number=0):
        sge = SGE(self._in.addr, length, self._region.lkey)
        flags = e.IBV_SEND_SIGNALED
        return SendWR(opcode=OPCODES[word], num_sge=1, sg=[sge], send_flags=flags, imm_data=socket.htonl(number))

    def data(self, word, peer, length, number):
        request = self._request(word, length, number)
        request.set_wr_rdma(peer[1], peer[0])
        self._queue_pair.post_send(request)

    def atomic(self, word, peer, first, second=0):
        request = self._request(word, 8)
        request.set_wr_atomic(peer[1], peer[0], first, second)
        self._queue_pair.post_send(request)


if __name__ == "__main__":
    operations_line.run(Operating)
