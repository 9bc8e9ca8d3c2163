"""Flags and enumerations: NetworkDirect's values (ndspi.h, nddef.h), and the same in Python as in C."""

from __future__ import annotations

import pytest

from ndpy import Access, Flags, Notify, Operation, Status


def test_access_has_the_values_of_the_header():
    """ND_MR_FLAG_ALLOW_LOCAL_WRITE, _REMOTE_READ, _REMOTE_WRITE, _RDMA_READ_SINK, _DO_NOT_SECURE_VM."""
    assert [
        Access.NONE,
        Access.LOCAL_WRITE,
        Access.REMOTE_READ,
        Access.REMOTE_WRITE,
        Access.READ_SINK,
        Access.DO_NOT_SECURE_VM,
    ] == [0, 1, 2, 5, 8, 0x80000000]
    assert Access.LOCAL_WRITE in Access.REMOTE_WRITE
    assert Access.LOCAL_WRITE in Access.REMOTE_ATOMIC


def test_flags_have_the_values_of_the_header():
    """ND_OP_FLAG_SILENT_SUCCESS 1, _READ_FENCE 2, _SEND_AND_SOLICIT_EVENT 4, _INLINE 0x20."""
    assert [Flags.NONE, Flags.SILENT_SUCCESS, Flags.READ_FENCE, Flags.SOLICITED, Flags.INLINE] == [0, 1, 2, 4, 0x20]


def test_operations_and_notifications_have_the_values_of_the_header():
    """ND2_REQUEST_TYPE: receive, send, bind, invalidate, read, write; ND_CQ_NOTIFY_ERRORS, _ANY, _SOLICITED."""
    assert [
        Operation.RECEIVE,
        Operation.SEND,
        Operation.BIND,
        Operation.INVALIDATE,
        Operation.READ,
        Operation.WRITE,
    ] == [0, 1, 2, 3, 4, 5]
    assert [Notify.ERRORS, Notify.ANY, Notify.SOLICITED] == [0, 1, 2]


@pytest.mark.parametrize(("enumeration", "prefix"), [(Operation, ""), (Status, ""), (Flags, "")])
def test_python_and_c_agree(enumeration, prefix):
    verbs = pytest.importorskip("ndpy._verbs")
    for member in enumeration:
        if member.name not in ("NONE",):
            assert getattr(verbs.lib, f"NDPY_{prefix}{member.name}") == member.value, member


def test_every_status_of_the_contract_has_a_name():
    """Contract F.6.3, and the statuses that pass through unknown. The native side knows their numbers."""
    assert [status.name for status in sorted(Status)] == [
        "SUCCESS",
        "CANCELED",
        "ACCESS_VIOLATION",
        "BUFFER_OVERFLOW",
        "DATA_OVERRUN",
        "IO_TIMEOUT",
        "REMOTE_ERROR",
        "INVALID_REQUEST",
        "INTERNAL_ERROR",
        "UNKNOWN",
    ]
    assert [status.value for status in Status] == list(range(10))
