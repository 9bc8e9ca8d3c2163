"""What test_fault_sweeps.py runs: a program that passes places and has faults as if it had an adapter. How it behaves
under each kind of fault is in BEHAVIOURS.

python swept_program.py FOLDER: it leaves files with the numbers of its processes there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(sys.argv[1])
# softrdma/faults/scenario.h: at << 48 | what << 32 | queue_pair, and how often. post_send of queue pair 1, and its
# sends.
PLACES = {(0, 17, 1): 3, (1, 1, 1): 5}


def start(*code: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)", *code])
    (FOLDER / f"{process.pid}.pid").touch()


def hang() -> None:
    start()
    time.sleep(600)


def leave() -> None:
    start()
    # What it leaves is in another session.
    time.sleep(0.2)


BEHAVIOURS: dict[str, Callable[[], object]] = {
    "errno": lambda: sys.exit("post_send: Cannot allocate memory"),
    "status": lambda: print("WRONG DATA at byte 7"),
    "delay": hang,
    "silent": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "hold": leave,
    "slow": lambda: None,
}


def main() -> None:
    (FOLDER / f"{os.getpid()}.pid").touch()
    lines = Path(os.environ["NDPY_FAULTS"]).read_text().splitlines()
    paths = dict(line.split(" ", 1) for line in lines if line.startswith(("report ", "count ")))
    if "count" in paths:
        slots = [struct.pack("=QQ", 1 << 63 | at << 48 | what << 32 | qp, n) for (at, what, qp), n in PLACES.items()]
        Path(paths["count"]).write_bytes(struct.pack("=8sII", b"ndpcount", 1, 4) + b"".join(slots) + bytes(32))
    for line in lines:
        words = dict(re.findall(r"(\w+)=(\S+)", line))
        # The last time, it takes another way.
        if not words or (words["nth"] == "3" and words["do"] == "slow"):
            continue
        fired = {"fault": 0, "pid": os.getpid(), "place": words.get("call") or words["operation"], "does": words["do"]}
        with open(paths["report"], "a") as file:
            file.write(json.dumps(fired | {"count": int(words["nth"]), "queue_pair": 1}) + "\n")
        BEHAVIOURS[words["do"]]()


main()
