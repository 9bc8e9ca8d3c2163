"""The data path in C (cdefs/data_path.c, rings.c, verbs/data_path.c) over a provider that the test plays itself.

Numbers of the provider's side are those of <infiniband/verbs.h>.
"""

from __future__ import annotations

import ctypes
import errno
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("verbs are Linux's", allow_module_level=True)

from ndpy.verbs.library import ffi, lib

SOURCE = Path(__file__).with_name("data_path_provider.c")

# enum ibv_wr_opcode, ibv_send_flags, ibv_wc_opcode, ibv_wc_flags
WR_WRITE, WR_SEND, WR_READ, WR_LOCAL_INV, WR_BIND_MW, WR_SEND_WITH_INV = 0, 2, 4, 7, 8, 9
FENCE, SIGNALED, SOLICITED, INLINE = 1, 2, 4, 8
WC_SEND, WC_RECV = 0, 128
WC_IP_CSUM_OK, WC_WITH_INV = 4, 8

NUMBER = 5
DEPTH = 8
CONTEXT = 0x1122334455667788
MAX_LENGTH = 1000
INLINE_SIZE = 64
EVERY_OPERATION = (
    lib.NDPY_SEND,
    lib.NDPY_READ,
    lib.NDPY_WRITE,
    lib.NDPY_SEND_AND_INVALIDATE,
    lib.NDPY_BIND,
    lib.NDPY_INVALIDATE,
)


class Sent(ctypes.Structure):
    """struct sent of data_path_provider.c."""

    _fields_ = (
        *(
            (name, ctypes.c_uint64)
            for name in ["id", "address", "remote_address", "bind_address", "bind_length", "window", "region"]
        ),
        *(
            (name, ctypes.c_uint32)
            for name in [
                "opcode",
                "flags",
                "elements",
                "length",
                "key",
                "remote_key",
                "invalidated_key",
                "bind_key",
                "bind_access",
                "posted",
            ]
        ),
    )


class Provider:
    """The native queue pair, shared receive queue and completion queue, and what is made on them."""

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
        lib.ndpy_queue_pair_set_connection(made, lib.NDPY_CONNECTED if connection is None else connection)
        return made

    def shared_queue(self) -> Any:
        made = lib.ndpy_shared_queue_new(self.native("shared_queue"), 4, 2, MAX_LENGTH)
        return self.keep(made, lib.ndpy_shared_queue_free)

    def complete(self, opcode: int = WC_SEND, status: int = 0, nbytes: int = 0, flags: int = 0, key: int = 0) -> int:
        """The request posted last ends; its id."""
        self.library.complete(self.sent.id, opcode, status, nbytes, flags, key)
        return int(self.sent.id)

    def poll(self, count: int = 64) -> list[Any]:
        out = ffi.new("struct ndpy_completion[]", max(count, 1))
        # The program's memory holds what was there before.
        ffi.memmove(out, b"\xaa" * ffi.sizeof(out), ffi.sizeof(out))
        done = lib.ndpy_poll(self.cq, out, count)
        assert done >= 0, done
        self._out = out
        return [out[place] for place in range(done)]

    def poll_hidden(self, count: int) -> list[Any]:
        out = ffi.new("struct ndpy_completion[]", max(count, 1))
        done = lib.ndpy_poll_internal(self.cq, out, count)
        self._hidden = out
        return [out[place] for place in range(done)]

    def free(self) -> None:
        for made, free in reversed(self._made):
            free(made)


@pytest.fixture(scope="module")
def provider_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("gcc") or not Path("/usr/include/infiniband/verbs.h").exists():
        pytest.skip("building the provider needs gcc and libibverbs-dev")
    path = tmp_path_factory.mktemp("data_path") / "provider.so"
    flags = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    done = subprocess.run(["gcc", *flags, "-o", path, SOURCE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def provider(provider_path: Path, tmp_path: Path) -> Iterator[Provider]:
    # A copy, so that each test has variables of its own.
    provider = Provider(Path(shutil.copy(provider_path, tmp_path / "provider.so")))
    yield provider
    provider.free()


def elements(*lengths: int) -> Any:
    return ffi.new("struct ndpy_element[]", [(0x1000 + place, length, 7) for place, length in enumerate(lengths)] or 1)


def post(qp: Any, operation: int, *lengths: int, flags: int = 0, context: int = CONTEXT) -> int:
    return int(lib.ndpy_post(qp, operation, flags, context, elements(*lengths), len(lengths), 0xABCDEF, 0x99))


def bind(qp: Any, flags: int = 0, length: int = 5000) -> int:
    window, region = ffi.cast("struct ibv_mw *", 0x111), ffi.cast("struct ibv_mr *", 0x222)
    return int(lib.ndpy_post_bind(qp, flags, CONTEXT, window, region, 0x3000, length, 0x1F, 0x77))


def post_any(qp: Any, operation: int, flags: int = 0) -> int:
    if operation == lib.NDPY_BIND:
        return bind(qp, flags)
    if operation == lib.NDPY_INVALIDATE:
        return int(lib.ndpy_post_invalidate(qp, flags, CONTEXT, 0x77))
    return post(qp, operation, 1, flags=flags)


def silent(qp: Any, times: int) -> None:
    for _ in range(times):
        assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS) == 0


def in_flight(qp: Any, receive: int = 0) -> int:
    return int(lib.ndpy_queue_pair_in_flight(qp, receive))


# ---- posting ----


@pytest.mark.parametrize(
    ("operation", "opcode"),
    [
        (lib.NDPY_SEND, WR_SEND),
        (lib.NDPY_READ, WR_READ),
        (lib.NDPY_WRITE, WR_WRITE),
        (lib.NDPY_SEND_AND_INVALIDATE, WR_SEND_WITH_INV),
    ],
)
def test_a_request_reaches_the_provider_as_it_was_posted(provider, operation, opcode):
    qp = provider.queue_pair()
    assert post(qp, operation, 10, 20) == 0
    sent = provider.sent
    assert (sent.opcode, sent.flags, sent.elements, sent.address, sent.length, sent.key) == (
        opcode,
        SIGNALED,
        2,
        0x1000,
        10,
        7,
    )
    if operation in (lib.NDPY_READ, lib.NDPY_WRITE):
        assert (sent.remote_address, sent.remote_key) == (0xABCDEF, 0x99)
    if operation == lib.NDPY_SEND_AND_INVALIDATE:
        assert sent.invalidated_key == 0x99
    provider.complete(opcode=WC_SEND)
    (completion,) = provider.poll()
    expected = lib.NDPY_SEND if operation == lib.NDPY_SEND_AND_INVALIDATE else operation
    assert (completion.context, completion.nbytes, completion.operation) == (CONTEXT, 30, expected)


def test_one_element_is_posted_without_a_list(provider):
    qp = provider.queue_pair()
    assert lib.ndpy_post_one(qp, lib.NDPY_WRITE, 0, CONTEXT, 0x5000, 40, 8, 0xABC, 0x98) == 0
    sent = provider.sent
    assert (sent.elements, sent.address, sent.length, sent.key) == (1, 0x5000, 40, 8)
    assert (sent.remote_address, sent.remote_key) == (0xABC, 0x98)


def test_binding_and_invalidating_reach_the_provider_as_they_were_posted(provider):
    qp = provider.queue_pair()
    assert bind(qp, length=5000) == 0
    sent = provider.sent
    assert (sent.opcode, sent.window, sent.region, sent.bind_key) == (WR_BIND_MW, 0x111, 0x222, 0x77)
    assert (sent.bind_address, sent.bind_length, sent.bind_access) == (0x3000, 5000, 0x1F)
    provider.complete()
    assert lib.ndpy_post_invalidate(qp, 0, CONTEXT, 0x66) == 0
    assert (sent.opcode, sent.invalidated_key) == (WR_LOCAL_INV, 0x66)
    provider.complete()
    bound, invalidated = provider.poll()
    assert (bound.operation, bound.nbytes) == (lib.NDPY_BIND, 5000)
    assert (invalidated.operation, invalidated.nbytes) == (lib.NDPY_INVALIDATE, 0)


@pytest.mark.parametrize(
    ("flag", "native"),
    [
        (lib.NDPY_READ_FENCE, SIGNALED | FENCE),
        (lib.NDPY_SOLICITED, SIGNALED | SOLICITED),
        (lib.NDPY_INLINE, SIGNALED | INLINE),
        (lib.NDPY_SILENT_SUCCESS, 0),
    ],
)
def test_each_flag_has_its_native_one(provider, flag, native):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_SEND, 1, flags=flag) == 0
    assert provider.sent.flags == native


@pytest.mark.parametrize("operation", EVERY_OPERATION)
def test_an_operation_takes_its_own_flags_and_refuses_the_others(provider, operation):
    allowed = lib.NDPY_SILENT_SUCCESS | lib.NDPY_READ_FENCE
    if operation in (lib.NDPY_SEND, lib.NDPY_SEND_AND_INVALIDATE):
        allowed |= lib.NDPY_SOLICITED | lib.NDPY_INLINE
    elif operation == lib.NDPY_WRITE:
        allowed |= lib.NDPY_INLINE
    elif operation in (lib.NDPY_BIND, lib.NDPY_INVALIDATE):
        allowed |= lib.NDPY_MARKER
    qp = provider.queue_pair(depth=64)
    for flag in (1 << bit for bit in range(32)):
        assert post_any(qp, operation, flag) == (0 if flag & allowed else lib.NDPY_BAD_FLAGS), hex(flag)


def test_where_all_is_fenced_only_reads_are_not(provider):
    qp = provider.queue_pair()
    lib.ndpy_queue_pair_fence_all(qp)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == 0
        assert bool(provider.sent.flags & FENCE) == (operation != lib.NDPY_READ)


def test_the_number_of_elements_is_limited(provider):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_SEND, 1, 1, 1) == 0
    assert post(qp, lib.NDPY_SEND, 1, 1, 1, 1) == lib.NDPY_TOO_MANY_ELEMENTS
    assert post(qp, lib.NDPY_RECEIVE, 1, 1) == 0
    assert post(qp, lib.NDPY_RECEIVE, 1, 1, 1) == lib.NDPY_TOO_MANY_ELEMENTS
    assert (in_flight(qp), in_flight(qp, 1)) == (1, 1)


@pytest.mark.parametrize("operation", [lib.NDPY_SEND, lib.NDPY_READ, lib.NDPY_WRITE, lib.NDPY_RECEIVE])
def test_the_length_of_all_elements_is_limited(provider, operation):
    qp = provider.queue_pair()
    assert post(qp, operation, MAX_LENGTH - 10, 10) == 0
    assert post(qp, operation, MAX_LENGTH - 10, 11) == lib.NDPY_TOO_LONG
    assert post(qp, operation, MAX_LENGTH + 1) == lib.NDPY_TOO_LONG
    assert provider.sent.posted == 1


@pytest.mark.parametrize("operation", [lib.NDPY_SEND, lib.NDPY_WRITE, lib.NDPY_SEND_AND_INVALIDATE])
def test_the_length_of_inline_data_is_limited(provider, operation):
    qp = provider.queue_pair()
    assert post(qp, operation, INLINE_SIZE - 10, 10, flags=lib.NDPY_INLINE) == 0
    assert post(qp, operation, INLINE_SIZE - 10, 11, flags=lib.NDPY_INLINE) == lib.NDPY_INLINE_TOO_LONG
    assert post(qp, operation, INLINE_SIZE + 1) == 0


def test_before_a_connection_only_receives_are_taken(provider):
    qp = provider.queue_pair(connection=lib.NDPY_NEVER_CONNECTED)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == lib.NDPY_NOT_CONNECTED
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    lib.ndpy_queue_pair_set_connection(qp, lib.NDPY_ENDED)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == 0


def test_a_peer_that_serves_no_reads_gets_none(provider):
    qp = provider.queue_pair()
    lib.ndpy_queue_pair_refuse_reads(qp)
    for operation in EVERY_OPERATION:
        assert post_any(qp, operation) == (lib.NDPY_NO_READS if operation == lib.NDPY_READ else 0)


@pytest.mark.parametrize("depth", [1, 2, DEPTH])
def test_each_direction_takes_as_many_requests_as_it_was_made_for(provider, depth):
    qp = provider.queue_pair(depth=depth)
    for operation, receive, most in ((lib.NDPY_SEND, 0, depth), (lib.NDPY_RECEIVE, 1, depth + 1)):
        for number in range(3 * most):
            posted = post(qp, operation, 1, context=number)
            assert posted == (0 if number < most else lib.NDPY_QUEUE_FULL)
        assert in_flight(qp, receive) == most


def test_a_place_is_free_again_once_its_completion_was_taken(provider):
    qp = provider.queue_pair(depth=2)
    for number in range(50):
        assert post(qp, lib.NDPY_SEND, 1, context=number) == 0
        provider.complete()
        if number % 2:
            assert post(qp, lib.NDPY_SEND, 1) == lib.NDPY_QUEUE_FULL
            assert [completion.context for completion in provider.poll()] == [number - 1, number]
    assert lib.ndpy_queue_pair_posted(qp) == 50


@pytest.mark.parametrize(
    ("result", "number", "seen"),
    [
        (errno.ENOMEM, 0, errno.ENOMEM),
        (-errno.ENOMEM, 0, errno.ENOMEM),
        (-1, errno.EINVAL, errno.EINVAL),
        (-1, 0, errno.EIO),
        (1, errno.EINVAL, 1),
        (errno.ENOTCONN, 0, errno.ENOTCONN),
    ],
)
def test_what_the_provider_refuses_is_said_and_takes_no_place(provider, result, number, seen):
    qp = provider.queue_pair()
    provider.set(post_result=result, post_errno=number)
    assert post(qp, lib.NDPY_SEND, 1) == seen
    assert post(qp, lib.NDPY_RECEIVE, 1) == seen
    assert post(qp, lib.NDPY_RECEIVE) == seen
    queue = provider.shared_queue()
    assert lib.ndpy_post_shared(queue, 0, CONTEXT, elements(1), 1) == seen
    assert (in_flight(qp), in_flight(qp, 1), lib.ndpy_queue_pair_posted(qp)) == (0, 0, 0)
    assert lib.ndpy_post_marker(qp) == 0


def test_a_request_that_the_lost_connection_will_never_complete_is_cancelled_in_the_end(provider):
    """siw knows of the connection's end before the connection manager has told it."""
    qp = provider.queue_pair()
    lib.ndpy_queue_pair_fence_all(qp)
    provider.set(post_result=errno.ENOTCONN)
    assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS) == 0
    assert bind(qp, lib.NDPY_SILENT_SUCCESS | lib.NDPY_MARKER) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 2
    lost, marker = provider.poll()
    # Silent or not, it did not succeed.
    assert (lost.status, lost.flags, lost.operation) == (lib.NDPY_CANCELED, 0, lib.NDPY_SEND)
    assert marker.flags == lib.NDPY_INTERNAL


def test_after_an_end_that_completes_nothing_requests_are_kept_from_the_provider(provider):
    qp = provider.queue_pair(connection=lib.NDPY_ENDED_UNPOSTED)
    assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS) == 0
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    assert provider.sent.posted == 0
    assert (in_flight(qp), in_flight(qp, 1)) == (1, 1)
    assert (lib.ndpy_cancel_rest(qp, 0, provider.cq), lib.ndpy_cancel_rest(qp, 1, provider.cq)) == (1, 1)
    assert [(each.status, each.flags) for each in provider.poll()] == [(lib.NDPY_CANCELED, 0)] * 2


def test_a_receive_without_elements_gets_an_empty_one_where_the_provider_asks_for_it(provider):
    """libsiw does."""
    qp, queue = provider.queue_pair(), provider.shared_queue()
    assert post(qp, lib.NDPY_RECEIVE) == 0
    assert provider.sent.elements == 0
    provider.set(refuses_empty=1)
    assert post(qp, lib.NDPY_RECEIVE) == 0
    assert (provider.sent.elements, provider.sent.length) == (1, 0)
    assert post(qp, lib.NDPY_RECEIVE, 5) == 0
    assert (provider.sent.elements, provider.sent.length) == (1, 5)
    assert lib.ndpy_post_shared(queue, 0, CONTEXT, elements(), 0) == 0
    assert (provider.sent.elements, provider.sent.length, provider.sent.posted) == (1, 0, 4)


def test_receives_of_a_shared_queue_are_limited_and_complete_as_its(provider):
    queue = provider.shared_queue()
    assert lib.ndpy_post_shared(queue, 1, 1, elements(1, 1, 1), 3) == lib.NDPY_TOO_MANY_ELEMENTS
    assert lib.ndpy_post_shared(queue, 1, 1, elements(MAX_LENGTH - 10, 11), 2) == lib.NDPY_TOO_LONG
    assert provider.sent.posted == 0
    for slot in (3, 0):
        assert lib.ndpy_post_shared(queue, slot, CONTEXT + slot, elements(MAX_LENGTH - 10, 10), 2) == 0
        assert (provider.sent.elements, provider.sent.length) == (2, MAX_LENGTH - 10)
        provider.complete(WC_RECV, nbytes=123)
    first, second = provider.poll()
    assert (first.context, second.context, first.slot, second.slot) == (CONTEXT + 3, CONTEXT, 3, 0)
    # The provider's number of the queue pair: the slot belongs to none.
    assert (first.operation, first.nbytes, first.queue_pair, first.retired) == (lib.NDPY_RECEIVE, 123, 77, 0)
    assert first.flags == second.flags == lib.NDPY_FROM_SHARED_QUEUE


# ---- silent requests ----


@pytest.mark.parametrize("depth", [1, 2, 3, 8, 9])
def test_of_silent_requests_one_in_half_a_ring_is_signaled_and_hidden(provider, depth):
    qp = provider.queue_pair(depth=depth)
    signaled = []
    for number in range(3 * depth):
        silent(qp, 1)
        if provider.sent.flags & SIGNALED:
            signaled.append(number + 1)
            provider.complete()
            (hidden,) = provider.poll()
            assert (hidden.flags, hidden.retired) == (
                lib.NDPY_INTERNAL,
                number + 1 - (signaled[-2] if signaled[1:] else 0),
            )
            assert in_flight(qp) == 0
    half = (depth + 1) // 2
    assert signaled == [*range(half, 3 * depth + 1, half)]


def test_a_signaled_request_begins_a_new_run_and_retires_the_silent_ones_before_it(provider):
    qp = provider.queue_pair()
    silent(qp, 3)
    assert post(qp, lib.NDPY_SEND, 1) == 0
    provider.complete()
    (completion,) = provider.poll()
    assert (completion.retired, completion.slot, completion.flags) == (4, 3, 0)
    silent(qp, 3)
    assert not provider.sent.flags & SIGNALED


def test_a_silent_request_that_fails_shows(provider):
    qp = provider.queue_pair()
    silent(qp, 1)
    provider.complete(status=lib.IBV_WC_REM_ACCESS_ERR)
    (completion,) = provider.poll()
    assert (completion.flags, completion.status) == (0, lib.NDPY_ACCESS_VIOLATION)


def test_a_marker_is_signaled_and_hidden_however_it_ends(provider):
    qp = provider.queue_pair()
    for status in (lib.IBV_WC_SUCCESS, lib.IBV_WC_WR_FLUSH_ERR):
        silent(qp, 2)
        assert lib.ndpy_post_marker(qp) == 1
        sent = provider.sent
        assert (sent.opcode, sent.flags, sent.elements, sent.length) == (WR_SEND, SIGNALED, 0, 0)
        provider.complete(status=status)
        (marker,) = provider.poll()
        assert (marker.flags, marker.retired, marker.context, marker.nbytes) == (lib.NDPY_INTERNAL, 3, 0, 0)
        assert marker.operation == lib.NDPY_SEND


def test_there_is_no_marker_where_nothing_is_silent_or_no_place_is_left(provider):
    qp = provider.queue_pair(depth=4)
    assert lib.ndpy_post_marker(qp) == 0
    assert post(qp, lib.NDPY_SEND, 1) == 0
    assert lib.ndpy_post_marker(qp) == 0
    silent(qp, 1)
    assert lib.ndpy_post_marker(qp) == 1
    # The run ended with it.
    assert lib.ndpy_post_marker(qp) == 0
    silent(qp, 1)
    assert lib.ndpy_post_marker(qp) == 0
    assert in_flight(qp) == 4


def test_a_marker_that_the_provider_refuses_takes_no_place(provider):
    qp = provider.queue_pair()
    silent(qp, 1)
    provider.set(post_result=errno.ENOMEM)
    assert lib.ndpy_post_marker(qp) == 0
    assert in_flight(qp) == 1
    provider.set(post_result=0)
    assert lib.ndpy_post_marker(qp) == 1


# ---- completions ----


def test_a_receive_has_the_bytes_that_came_and_a_failure_has_none(provider):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_RECEIVE, 500, context=1) == 0
    provider.complete(WC_RECV, nbytes=123)
    assert post(qp, lib.NDPY_RECEIVE, 500, context=2) == 0
    provider.complete(WC_RECV, lib.IBV_WC_WR_FLUSH_ERR, nbytes=123)
    assert post(qp, lib.NDPY_SEND, 40, context=3) == 0
    provider.complete(WC_SEND, lib.IBV_WC_RETRY_EXC_ERR)
    came, flushed, failed = provider.poll()
    assert (came.nbytes, came.status, came.vendor_status, came.native_status) == (123, lib.NDPY_SUCCESS, 0, 0)
    assert (flushed.nbytes, flushed.status, flushed.vendor_status) == (0, lib.NDPY_CANCELED, 88)
    assert (failed.nbytes, failed.status, failed.vendor_status) == (0, lib.NDPY_IO_TIMEOUT, 88)
    assert (failed.native_status, failed.queue_pair) == (lib.IBV_WC_RETRY_EXC_ERR, NUMBER)
    assert [each.slot for each in (came, flushed, failed)] == [0, 1, 0]
    assert [each.retired for each in (came, flushed, failed)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("native", "operation", "status"),
    [
        ("LOC_PROT_ERR", "SEND", "ACCESS_VIOLATION"),
        ("LOC_ACCESS_ERR", "SEND", "ACCESS_VIOLATION"),
        ("REM_ACCESS_ERR", "READ", "ACCESS_VIOLATION"),
        ("LOC_LEN_ERR", "RECEIVE", "BUFFER_OVERFLOW"),
        ("LOC_LEN_ERR", "SEND", "DATA_OVERRUN"),
        ("REM_INV_REQ_ERR", "SEND", "DATA_OVERRUN"),
        ("REM_INV_REQ_ERR", "READ", "REMOTE_ERROR"),
        ("RETRY_EXC_ERR", "SEND", "IO_TIMEOUT"),
        ("RNR_RETRY_EXC_ERR", "SEND", "IO_TIMEOUT"),
        ("RESP_TIMEOUT_ERR", "SEND", "IO_TIMEOUT"),
        ("REM_OP_ERR", "SEND", "REMOTE_ERROR"),
        ("REM_INV_RD_REQ_ERR", "READ", "REMOTE_ERROR"),
        ("REM_ABORT_ERR", "SEND", "REMOTE_ERROR"),
        ("LOC_QP_OP_ERR", "RECEIVE", "BUFFER_OVERFLOW"),
        ("LOC_QP_OP_ERR", "SEND", "ACCESS_VIOLATION"),
        ("LOC_QP_OP_ERR", "BIND", "INVALID_REQUEST"),
        ("LOC_QP_OP_ERR", "INVALIDATE", "INVALID_REQUEST"),
        ("MW_BIND_ERR", "BIND", "INVALID_REQUEST"),
        ("LOC_EEC_OP_ERR", "SEND", "INTERNAL_ERROR"),
        ("BAD_RESP_ERR", "SEND", "INTERNAL_ERROR"),
        ("FATAL_ERR", "SEND", "INTERNAL_ERROR"),
        ("GENERAL_ERR", "SEND", "INTERNAL_ERROR"),
        ("LOC_RDD_VIOL_ERR", "SEND", "UNKNOWN"),
    ],
)
def test_each_native_status_has_its_own_for_the_operation(provider, native, operation, status):
    qp = provider.queue_pair()
    assert post_any(qp, getattr(lib, f"NDPY_{operation}")) == 0
    provider.complete(status=getattr(lib, f"IBV_WC_{native}"))
    assert [each.status for each in provider.poll()] == [getattr(lib, f"NDPY_{status}")]


@pytest.mark.parametrize(
    ("native", "status"),
    [
        ("SUCCESS", "SUCCESS"),
        ("WR_FLUSH_ERR", "CANCELED"),
        ("LOC_LEN_ERR", "ACCESS_VIOLATION"),
        ("GENERAL_ERR", "ACCESS_VIOLATION"),
    ],
)
def test_a_receive_into_memory_that_may_not_be_written_fails_for_that(provider, native, status):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_RECEIVE, 1, flags=lib.NDPY_UNWRITABLE) == 0
    provider.complete(WC_RECV, getattr(lib, f"IBV_WC_{native}"))
    assert [each.status for each in provider.poll()] == [getattr(lib, f"NDPY_{status}")]


@pytest.mark.parametrize(("flag", "told"), [(WC_WITH_INV, True), (WC_IP_CSUM_OK, True), (0, False)])
def test_a_receive_tells_which_window_its_message_took_back(provider, flag, told):
    """rxe passes on the kernel's number for it, which is here a flag of datagrams."""
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    provider.complete(WC_RECV, flags=flag, key=0x55)
    (completion,) = provider.poll()
    assert (completion.flags, completion.vendor_status) == ((lib.NDPY_INVALIDATED, 0x55) if told else (0, 0))
    assert post(qp, lib.NDPY_RECEIVE, 1) == 0
    provider.complete(WC_RECV, lib.IBV_WC_WR_FLUSH_ERR, flags=flag, key=0x55)
    (completion,) = provider.poll()
    assert (completion.flags, completion.vendor_status) == (0, 88)


def test_a_completion_out_of_order_ends_what_came_before_and_that_ends_nothing_again(provider):
    qp = provider.queue_pair()
    ids = []
    for number in range(3):
        assert post(qp, lib.NDPY_SEND, 1, context=number) == 0
        ids.append(provider.sent.id)
    for which in (1, 0, 2):
        provider.library.complete(ids[which], WC_SEND, 0, 0, 0, 0)
    assert [(each.context, each.retired) for each in provider.poll()] == [(1, 2), (0, 0), (2, 1)]
    assert in_flight(qp) == 0


def test_a_completion_of_a_request_that_was_refused_is_hidden_and_retires_nothing(provider):
    """libsiw keeps a request that the kernel refused, and the kernel flushes it in the end."""
    qp = provider.queue_pair()
    provider.set(post_result=errno.ENOMEM)
    assert post(qp, lib.NDPY_SEND, 1) == errno.ENOMEM
    provider.complete(status=lib.IBV_WC_WR_FLUSH_ERR)
    (completion,) = provider.poll()
    assert (completion.flags, completion.retired) == (lib.NDPY_INTERNAL, 0)
    assert lib.ndpy_queue_pair_ended(qp, 0) == 1


def test_whether_the_first_requests_have_ended_and_how(provider):
    qp = provider.queue_pair()
    for _ in range(3):
        assert post(qp, lib.NDPY_SEND, 1) == 0
        provider.complete()
    assert lib.ndpy_queue_pair_posted(qp) == 3
    assert [lib.ndpy_queue_pair_ended(qp, count) for count in (0, 1, 3)] == [1, 0, 0]
    provider.poll(2)
    assert [lib.ndpy_queue_pair_ended(qp, count) for count in (1, 2, 3)] == [1, 1, 0]
    assert post(qp, lib.NDPY_SEND, 1) == 0
    provider.complete(status=lib.IBV_WC_RETRY_EXC_ERR)
    provider.poll()
    assert [lib.ndpy_queue_pair_ended(qp, count) for count in (3, 4, 5)] == [-1, -1, 0]


def flood(provider: Provider, count: int) -> Any:
    """So many requests that have ended, with their number as context."""
    qp = provider.queue_pair(depth=count)
    for number in range(count):
        assert post(qp, lib.NDPY_SEND, 1, context=number) == 0
        provider.complete()
    return qp


@pytest.mark.parametrize("wanted", [0, 1, 31, 32, 33, 99, 100, 101, 200])
def test_a_poll_takes_up_to_what_is_wanted_oldest_first(provider, wanted):
    flood(provider, 100)
    taken = provider.poll(wanted)
    assert [each.context for each in taken] == [*range(min(wanted, 100))]
    rest = provider.poll(200)
    assert [each.context for each in rest] == [*range(len(taken), 100)]


def test_a_poll_that_gets_less_than_it_asked_for_does_not_ask_again(provider):
    flood(provider, 3)
    provider.poll(64)
    assert provider.get("polled") == 1


def test_a_poll_that_fails_says_so_unless_it_has_something(provider):
    flood(provider, 2)
    out = ffi.new("struct ndpy_completion[]", 4)
    assert lib.ndpy_drain(provider.cq) == 2
    provider.set(poll_error=errno.EINVAL)
    assert lib.ndpy_drain(provider.cq) == -errno.EIO
    assert lib.ndpy_poll(provider.cq, out, 4) == 2
    assert lib.ndpy_poll(provider.cq, out, 4) == -errno.EIO
    assert lib.ndpy_poll(provider.cq, out, 0) == 0


# ---- completions that are kept ----


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 100])
def test_all_that_the_provider_has_is_kept_and_comes_first_and_once(provider, count):
    flood(provider, count)
    assert lib.ndpy_drain(provider.cq) == count
    assert lib.ndpy_undelivered(provider.cq) == count
    assert lib.ndpy_drain(provider.cq) == 0
    qp = provider.queue_pair(number=6)
    assert post(qp, lib.NDPY_SEND, 1, context=count) == 0
    provider.complete()
    assert [each.context for each in provider.poll(count - 1)] == [*range(count - 1)]
    assert lib.ndpy_undelivered(provider.cq) == 1
    assert [each.context for each in provider.poll()] == [count - 1, count]
    assert lib.ndpy_undelivered(provider.cq) == 0
    assert provider.poll() == []


def test_what_is_kept_stays_in_order_while_more_comes(provider):
    qp = provider.queue_pair(depth=200)
    taken, posted = [], 0
    for step in range(60):
        for _ in range(step % 7):
            assert post(qp, lib.NDPY_SEND, 1, context=posted) == 0
            provider.complete()
            posted += 1
        assert lib.ndpy_drain(provider.cq) == step % 7
        taken += [each.context for each in provider.poll(step % 5)]
        assert lib.ndpy_undelivered(provider.cq) == posted - len(taken)
    while some := provider.poll(50):
        taken += [each.context for each in some]
    assert taken == [*range(posted)]


def hide_some(provider: Provider) -> Any:
    """Kept: two hidden ones, a visible one, a hidden one."""
    qp = provider.queue_pair(depth=2)
    for hidden in (True, True, False, True):
        assert post(qp, lib.NDPY_SEND, 1, flags=lib.NDPY_SILENT_SUCCESS if hidden else 0) == 0
        provider.complete()
        assert lib.ndpy_drain(provider.cq) == int(not hidden)
    return qp


def test_hidden_ones_are_taken_up_to_the_first_that_is_for_the_program(provider):
    hide_some(provider)
    assert lib.ndpy_undelivered(provider.cq) == 1
    assert [each.flags for each in provider.poll_hidden(0)] == []
    assert [each.slot for each in provider.poll_hidden(1)] == [0]
    assert [each.slot for each in provider.poll_hidden(9)] == [1]
    assert provider.poll_hidden(9) == []
    assert lib.ndpy_undelivered(provider.cq) == 1
    assert [(each.slot, each.flags) for each in provider.poll(1)] == [(2, 0)]
    assert lib.ndpy_undelivered(provider.cq) == 0
    assert [each.slot for each in provider.poll_hidden(9)] == [3]
    assert provider.poll() == []
    flood(provider, 3)
    assert lib.ndpy_drain(provider.cq) == 3
    assert [each.context for each in provider.poll()] == [0, 1, 2]


def test_kept_completions_are_counted_by_their_queue_pair(provider):
    hide_some(provider)
    queue = provider.shared_queue()
    for slot in range(3):
        assert lib.ndpy_post_shared(queue, slot, slot, elements(1), 1) == 0
        provider.complete(WC_RECV)
    lib.ndpy_drain(provider.cq)
    flood(provider, 2)
    lib.ndpy_drain(provider.cq)
    assert [lib.ndpy_stored_of(provider.cq, number) for number in (NUMBER, 77, 6)] == [6, 0, 0]
    provider.poll_hidden(1)
    assert lib.ndpy_stored_of(provider.cq, NUMBER) == 5
    assert lib.ndpy_renumber_stored(provider.cq, NUMBER, 99) == 0
    assert lib.ndpy_renumber_stored(provider.cq, 77, 99) == 3
    assert lib.ndpy_renumber_stored(provider.cq, 77, 98) == 0
    shared = [each for each in provider.poll() if each.flags & lib.NDPY_FROM_SHARED_QUEUE]
    assert [(each.queue_pair, each.slot) for each in shared] == [(99, 0), (99, 1), (99, 2)]


@pytest.mark.parametrize("ended_before", [0, 5])
def test_what_is_left_of_a_queue_pair_is_cancelled_in_order(provider, ended_before):
    qp = provider.queue_pair()
    for _ in range(ended_before):
        assert post(qp, lib.NDPY_SEND, 1) == 0
        provider.complete()
    assert len(provider.poll()) == ended_before
    assert post(qp, lib.NDPY_SEND, 1, context=1) == 0
    silent(qp, 1)
    assert post(qp, lib.NDPY_READ, 1, context=3) == 0
    assert bind(qp, lib.NDPY_MARKER) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 4
    assert in_flight(qp) == 0
    assert lib.ndpy_queue_pair_ended(qp, ended_before + 4) == -1
    assert lib.ndpy_undelivered(provider.cq) == 2
    left = provider.poll()
    canceled, silent_success = (lib.NDPY_CANCELED, lib.IBV_WC_WR_FLUSH_ERR, 0), (lib.NDPY_SUCCESS, 0, lib.NDPY_INTERNAL)
    assert [(each.status, each.native_status, each.flags) for each in left] == [
        canceled,
        silent_success,
        canceled,
        silent_success,
    ]
    operations = [lib.NDPY_SEND, lib.NDPY_SEND, lib.NDPY_READ, lib.NDPY_BIND]
    assert [each.operation for each in left] == operations
    assert [(each.retired, each.queue_pair) for each in left] == [(1, NUMBER)] * 4
    assert [each.slot for each in left] == [ended_before + place for place in range(4)]
    assert (left[0].context, left[2].context, left[0].nbytes) == (1, 3, 0)


def test_cancelling_nothing_leaves_a_queue_pair_as_it_was(provider):
    qp = provider.queue_pair()
    assert post(qp, lib.NDPY_RECEIVE, 1, context=7) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 0
    assert (lib.ndpy_queue_pair_ended(qp, 0), in_flight(qp, 1)) == (1, 1)
    assert lib.ndpy_cancel_rest(qp, 1, provider.cq) == 1
    assert [(each.context, each.operation) for each in provider.poll()] == [(7, lib.NDPY_RECEIVE)]


def test_what_is_cancelled_comes_behind_what_was_kept(provider):
    flood(provider, 40)
    assert lib.ndpy_drain(provider.cq) == 40
    provider.poll(10)
    qp = provider.queue_pair(depth=100, number=6)
    for number in range(100):
        assert post(qp, lib.NDPY_SEND, 1, context=100 + number) == 0
    assert lib.ndpy_cancel_rest(qp, 0, provider.cq) == 100
    assert lib.ndpy_stored_of(provider.cq, 6) == 100
    assert [each.context for each in provider.poll(200)] == [*range(10, 40), *range(100, 200)]
