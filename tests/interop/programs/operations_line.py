"""An end that does as it is told: atomic operations, and numbers beside messages and writes. operations_pyverbs.py and
operations_ibverbs.py supply the calls.

It prints "endpoint NUMBER PSN ADDRESS RKEY" and reads "NUMBER PSN GID ADDRESS RKEY" of its peer. Then it prints
"connected". Each further line is a command, and has an answer:

    fetch_and_add ADD, compare_and_swap COMPARE SWAP   on the peer's memory: "ended STATUS FORMER"
    write LENGTH NUMBER, send LENGTH NUMBER            the first bytes of the alphabet, with a number: "ended STATUS"
    receive                                            posts a receive for the inbox: "posted"
    take                                               "OPCODE STATUS LENGTH NUMBER" of the next completion
    show                                               "bytes HEX" of the memory that the peer may use
"""

from __future__ import annotations

import argparse
import sys

SIZE = 64
LIMIT_S = 30.0
ALPHABET = b"abcdefghijklmnopqrstuvwxyz"


def run(kind):
    """Read and obey. kind: the class of the end. Its take() returns (opcode, status, length, number)."""
    parser = argparse.ArgumentParser()
    for name in ("device", "gid"):
        parser.add_argument(f"--{name}", required=True, type=str if name == "device" else int)
    options = parser.parse_args()
    options.size, options.limit = SIZE, LIMIT_S
    end = kind(options)
    print("endpoint", end.number, end.psn, *end.place, flush=True)
    number, psn, gid, address, rkey = sys.stdin.readline().split()
    end.connect(int(number), int(psn), bytes.fromhex(gid))
    peer = int(address), int(rkey)
    print("connected", flush=True)
    for line in sys.stdin:
        print(obey(end, peer, *line.split()), flush=True)


def obey(end, peer, word, *values):
    numbers = [int(value) for value in values]
    if word in ("write", "send"):
        end.inbox[: len(ALPHABET)] = ALPHABET
        end.data(word, peer, *numbers)
        return f"ended {end.take_any()[1]}"
    if word in ("fetch_and_add", "compare_and_swap"):
        end.atomic(word, peer, *numbers)
        status = end.take_any()[1]
        return f"ended {status} {int.from_bytes(bytes(end.inbox)[:8], sys.byteorder)}"
    if word == "receive":
        end.receive()
        return "posted"
    if word == "take":
        return " ".join(map(str, end.take_any()))
    return f"bytes {bytes(end.outbox).hex()}"
