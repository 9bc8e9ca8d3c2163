"""The end of operations_line.py with PyPI's ibverbs (rdma4py)."""

from __future__ import annotations

import ibverbs as ib
import operations_line
from pingpong_ibverbs import End

OPCODES = {
    "write": ib.WROpcode.RDMA_WRITE_WITH_IMM,
    "send": ib.WROpcode.SEND_WITH_IMM,
    "fetch_and_add": ib.WROpcode.ATOMIC_FETCH_AND_ADD,
    "compare_and_swap": ib.WROpcode.ATOMIC_CMP_AND_SWP,
}


class Operating(End):
    access = (
        ib.AccessFlags.LOCAL_WRITE
        | ib.AccessFlags.REMOTE_READ
        | ib.AccessFlags.REMOTE_WRITE
        | ib.AccessFlags.REMOTE_ATOMIC
    )

    @property
    def place(self):
        return self._address, self._region.rkey

    def receive(self):
        self.post_receive()

    def take_any(self):
        taken = self.take()
        return int(taken.opcode), int(taken.status), taken.byte_len, taken.imm_data

    def _post(self, word, peer, length, **numbers):
        self._queue_pair.post_send(
            ib.SendWR(
                sg_list=[ib.SGE(self._region, length, offset=self._size)],
                opcode=int(OPCODES[word]),
                send_flags=int(ib.SendFlags.SIGNALED),
                remote_addr=peer[0],
                rkey=peer[1],
                **numbers,
            )
        )

    def data(self, word, peer, length, number):
        self._post(word, peer, length, imm_data=number)

    def atomic(self, word, peer, first, second=0):
        self._post(word, peer, 8, compare_add=first, swap=second)


if __name__ == "__main__":
    operations_line.run(Operating)
