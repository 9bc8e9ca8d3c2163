"""A provider that the test plays itself, beneath the data path in C (cdefs/data_path.h, rings.c, verbs/data_path.c).

The numbers of the provider are those of <infiniband/verbs.h>.
"""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compiled import SHARED
from fake_verbs import structure
from kit.compiling import compiled

from ndpy.platforms.verbs.native_calls import ffi, lib

SOURCE = Path(__file__).with_name("data_path_provider.c")

# enum ibv_wr_opcode, ibv_send_flags, ibv_wc_opcode, ibv_wc_status, ibv_wc_flags
WR_WRITE, WR_WRITE_WITH_IMM, WR_SEND, WR_SEND_WITH_IMM, WR_READ, WR_COMPARE_AND_SWAP, WR_FETCH_AND_ADD = range(7)
WR_LOCAL_INV, WR_BIND_MW, WR_SEND_WITH_INV = 7, 8, 9
FENCE, SIGNALED, SOLICITED, INLINE = 1, 2, 4, 8
WC_SEND, WC_RECV = 0, 128
PROTECTION, FLUSHED = 4, 5
WC_GRH, WC_IP_CSUM_OK, WC_WITH_INV = 1, 4, 8

NUMBER = 5
DEPTH = 8
CONTEXT = 0x1122334455667788
MAX_LENGTH = 1000
INLINE_SIZE = 64
ATOMIC_OPERATIONS = (lib.NDPY_COMPARE_AND_SWAP, lib.NDPY_FETCH_AND_ADD)
SPECIAL_OPERATIONS = (
    *ATOMIC_OPERATIONS,
    lib.NDPY_SEND_AND_INVALIDATE,
    lib.NDPY_SEND_WITH_IMMEDIATE,
    lib.NDPY_WRITE_WITH_IMMEDIATE,
)
EVERY_OPERATION = (
    lib.NDPY_SEND,
    lib.NDPY_READ,
    lib.NDPY_WRITE,
    *SPECIAL_OPERATIONS,
    lib.NDPY_BIND,
    lib.NDPY_INVALIDATE,
)
OFFERED = sum(1 << operation for operation in (lib.NDPY_RECEIVE, *EVERY_OPERATION))
IMMEDIATE = 0x81020304
OPERANDS = (0x1020304050607080, 0xFFEEDDCCBBAA9988)


Sent: Any = structure("sent", SOURCE)


class Provider:
    """A native queue pair, shared receive queue and completion queue, and the data path's objects that use them."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.sent = Sent.in_dll(self.library, "sent")
        self.library.complete.argtypes = [ctypes.c_uint64] + [ctypes.c_uint32] * 5
        self._made: list[tuple[Any, Any]] = []
        self.cq = self.keep(
            lib.ndpy_completion_queue_new(self.native("completion_queue")), lib.ndpy_completion_queue_free
        )

    def native(self, name: str) -> Any:
        return ffi.cast("void *", ctypes.addressof(ctypes.c_byte.in_dll(self.library, name)))

    def set(self, **values: int) -> None:
        for name, value in values.items():
            ctypes.c_int32.in_dll(self.library, name).value = value

    def get(self, name: str) -> int:
        return ctypes.c_int32.in_dll(self.library, name).value

    def keep(self, made: Any, free: Any) -> Any:
        assert made
        self._made.append((made, free))
        return made

    def queue_pair(self, depth: int = DEPTH, connection: int | None = None, number: int = NUMBER) -> Any:
        made = lib.ndpy_queue_pair_new(
            self.native("queue_pair"), number, depth, depth + 1, 3, 2, INLINE_SIZE, MAX_LENGTH
        )
        self.keep(made, lib.ndpy_queue_pair_free)
        lib.ndpy_queue_pair_offer(made, OFFERED)
        lib.ndpy_queue_pair_set_connection(made, lib.NDPY_CONNECTED if connection is None else connection)
        return made

    def shared_queue(self) -> Any:
        made = lib.ndpy_shared_queue_new(self.native("shared_queue"), 4, 2, MAX_LENGTH)
        return self.keep(made, lib.ndpy_shared_queue_free)

    def call(self) -> list[Sent]:
        """The requests of the last call, which may have posted a list."""
        calls = (Sent * 256).in_dll(self.library, "calls")
        return [Sent.from_buffer_copy(calls[place]) for place in range(self.get("in_call"))]

    def complete_request(
        self, request: Sent, opcode: int = WC_SEND, status: int = 0, nbytes: int = 0, flags: int = 0, key: int = 0
    ) -> None:
        self.library.complete(request.id, opcode, status, nbytes, flags, key)

    def complete(self, opcode: int = WC_SEND, status: int = 0, nbytes: int = 0, flags: int = 0, key: int = 0) -> int:
        """Complete the request that was posted last. Returns its ID."""
        self.library.complete(self.sent.id, opcode, status, nbytes, flags, key)
        return int(self.sent.id)

    def carry_out(
        self, qp: Any, operation: int, length: int, *, context: int = CONTEXT, flags: int = 0, **end: int
    ) -> None:
        """Post a request, and complete it with this status, or these bytes."""
        assert post(qp, operation, length, flags=flags, context=context) == 0
        self.complete(WC_RECV if operation == lib.NDPY_RECEIVE else WC_SEND, **end)

    def poll(self, count: int = 64) -> list[Any]:
        out = ffi.new("struct ndpy_completion[]", max(count, 1))
        # Fill the memory first, as a program's memory has old contents.
        ffi.memmove(out, b"\xaa" * ffi.sizeof(out), ffi.sizeof(out))
        done = lib.ndpy_poll(self.cq, out, count, ffi.new("uint32_t *"))
        assert done >= 0, done
        self._out = out
        return [out[place] for place in range(done)]

    def poll_internal(self, count: int) -> list[Any]:
        out = ffi.new("struct ndpy_completion[]", max(count, 1))
        done = lib.ndpy_poll_internal(self.cq, out, count)
        self._internal = out
        return [out[place] for place in range(done)]

    def free(self) -> None:
        for made, free in reversed(self._made):
            free(made)


@pytest.fixture(scope="module")
def provider_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("building the provider needs libibverbs-dev")
    return compiled(tmp_path_factory.mktemp("data_path") / "provider.so", *SHARED, SOURCE)


@pytest.fixture
def provider(provider_path: Path, tmp_path: Path) -> Iterator[Provider]:
    # Load a copy of the library, so that each test has its own variables.
    provider = Provider(Path(shutil.copy(provider_path, tmp_path / "provider.so")))
    yield provider
    provider.free()


def elements(*lengths: int) -> Any:
    return ffi.new("struct ndpy_element[]", [(0x1000 + place, 7, length) for place, length in enumerate(lengths)] or 1)


def remote(address: int, token: int) -> Any:
    words = {"immediate": IMMEDIATE, "operands": OPERANDS}
    return ffi.new("struct ndpy_remote *", {"address": address, "token": token, **words})


def post(
    qp: Any, operation: int, *lengths: int, flags: int = 0, context: int = CONTEXT, address: int = 0xABCDE8
) -> int:
    return int(lib.ndpy_post(qp, operation, flags, context, elements(*lengths), len(lengths), remote(address, 0x99)))


def bind(qp: Any, flags: int = 0, length: int = 5000) -> int:
    window, region = ffi.cast("struct ibv_mw *", 0x111), ffi.cast("struct ibv_mr *", 0x222)
    return int(lib.ndpy_post_bind(qp, flags, CONTEXT, window, region, 0x3000, length, 0x1F, 0x77))


def post_any(qp: Any, operation: int, flags: int = 0) -> int:
    if operation == lib.NDPY_BIND:
        return bind(qp, flags)
    if operation == lib.NDPY_INVALIDATE:
        return int(lib.ndpy_post_invalidate(qp, flags, CONTEXT, 0x77))
    return post(qp, operation, 8, flags=flags)


def silent(qp: Any, times: int) -> None:
    for _ in range(times):
        assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS) == 0


def in_flight(qp: Any, receive: int = 0) -> int:
    return int(lib.ndpy_queue_pair_in_flight(qp, receive))
