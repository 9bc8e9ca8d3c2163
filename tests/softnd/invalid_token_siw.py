"""In the VM: a client on siw that writes through a token that it was not given.  invalid_token_siw.py PORT"""

from __future__ import annotations

import contextlib
import sys

import ndpy


def main() -> None:
    with contextlib.ExitStack() as stack:
        adapter = stack.enter_context(ndpy.open_adapter("siw1"))
        received = stack.enter_context(adapter.create_completion_queue(4))
        initiated = stack.enter_context(adapter.create_completion_queue(4))
        memory = bytearray(64)
        region = stack.enter_context(adapter.register(memory, ndpy.Access.LOCAL_WRITE))
        queue_pair = stack.enter_context(adapter.create_queue_pair(received, initiated))
        queue_pair.receive(region)
        stack.enter_context(adapter.connect(queue_pair, ("10.0.2.2", int(sys.argv[1])), timeout_s=30))
        queue_pair.write(region, ndpy.RemoteMemory(0x1000, 64, 0x12345678))
        # siw completes the Write when TCP has it. The Receive ends when the peer ends the connection.
        (completion,) = received.wait(30)
        print(f"access_violation: the Receive completed with {completion.status.name}", flush=True)
        if completion.status is not ndpy.Status.CANCELED:
            sys.exit(1)


if __name__ == "__main__":
    main()
