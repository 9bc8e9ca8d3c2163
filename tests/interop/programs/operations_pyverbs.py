"""An end with pyverbs that does as it is told: atomic operations, and numbers beside messages and writes.

It prints "endpoint NUMBER PSN ADDRESS RKEY" and reads "NUMBER PSN GID ADDRESS RKEY" of its peer. Then it prints "connected". Each
further line is a command, and has an answer:

    fetch_and_add ADD, compare_and_swap COMPARE SWAP   on the peer's memory: "ended STATUS FORMER"
    write LENGTH NUMBER, send LENGTH NUMBER            the first bytes of the alphabet, with a number: "ended STATUS"
    receive                                            posts a receive for the inbox: "posted"
    take                                               "OPCODE STATUS LENGTH NUMBER" of the next completion
    show                                               "bytes HEX" of the memory that the peer may use
"""

from __future__ import annotations

import argparse
import socket
import sys

import pyverbs.enums as e
from pingpong_pyverbs import End
from pyverbs.wr import SGE, RecvWR, SendWR

SIZE = 64


class Operating(End):
    access = (
        e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_ATOMIC
    )

    @property
    def place(self):
        return self._region.buf, self._region.rkey

    def receive(self):
        self._queue_pair.post_recv(RecvWR(num_sge=1, sg=[self._in]))

    def _post(self, opcode, length, peer, number=0):
        sge = SGE(self._region.buf + SIZE, length, self._region.lkey)
        request = SendWR(
            opcode=opcode, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED, imm_data=socket.htonl(number)
        )
        request.set_wr_rdma(peer[1], peer[0])
        self._queue_pair.post_send(request)

    def data(self, opcode, peer, length, number):
        self.inbox.region.write(b"abcdefghijklmnopqrstuvwxyz", 26, SIZE)
        self._post(opcode, length, peer, number)
        return f"ended {self.take().status}"

    def atomic(self, opcode, peer, first, second=0):
        sge = SGE(self._region.buf + SIZE, 8, self._region.lkey)
        request = SendWR(opcode=opcode, num_sge=1, sg=[sge], send_flags=e.IBV_SEND_SIGNALED)
        request.set_wr_atomic(peer[1], peer[0], first, second)
        self._queue_pair.post_send(request)
        status = self.take().status
        return f"ended {status} {int.from_bytes(bytes(self.inbox)[:8], sys.byteorder)}"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("device", "gid"):
        parser.add_argument(f"--{name}", required=True, type=str if name == "device" else int)
    options = parser.parse_args()
    options.size = SIZE
    end = Operating(options)
    print("endpoint", end.number, end.psn, *end.place, flush=True)
    number, psn, gid, address, rkey = sys.stdin.readline().split()
    end.connect(int(number), int(psn), bytes.fromhex(gid))
    peer = int(address), int(rkey)
    print("connected", flush=True)
    opcodes = {
        "write": e.IBV_WR_RDMA_WRITE_WITH_IMM,
        "send": e.IBV_WR_SEND_WITH_IMM,
        "fetch_and_add": e.IBV_WR_ATOMIC_FETCH_AND_ADD,
        "compare_and_swap": e.IBV_WR_ATOMIC_CMP_AND_SWP,
    }
    for line in sys.stdin:
        word, *values = line.split()
        numbers = [int(value) for value in values]
        if word in ("write", "send"):
            answer = end.data(opcodes[word], peer, *numbers)
        elif word in opcodes:
            answer = end.atomic(opcodes[word], peer, *numbers)
        elif word == "receive":
            end.receive()
            answer = "posted"
        elif word == "take":
            taken = end.take()
            answer = f"{taken.opcode} {taken.status} {taken.byte_len} {socket.ntohl(taken.imm_data)}"
        else:
            answer = f"bytes {bytes(end.outbox).hex()}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
