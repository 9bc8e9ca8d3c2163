"""Section B of the contract: what Query reports, and layouts and slots as the DLL sees them."""

from __future__ import annotations

import pytest
import version2
from version2 import NULL, AdapterFlag, Status, ffi

SIZE = 96


def query(node, version=version2.ND_VERSION_2, given=SIZE, room=SIZE + 64):
    """(status, size, bytes) of Query."""
    data = ffi.new("unsigned char[]", b"\xa5" * (room + 1))
    ffi.cast("uint32_t *", data)[0] = version
    size = ffi.new("uint32_t *", given)
    code = node.adapter.Query(data, size)
    return code, size[0], bytes(ffi.buffer(data, room))


def test_b_1_1_a_status_is_severity_and_code():
    for name, value in {s.name: s.value for s in Status}.items():
        if name.startswith(("E_", "S_", "CLASS_")):
            continue
        assert value & 0x3FFF0000 == 0, name


def test_b_1_2_warnings_count_as_failed_and_pending_does_not():
    failed = {s for s in Status if s.failed}
    assert {Status.BUFFER_OVERFLOW, Status.DEVICE_BUSY, Status.NO_MORE_ENTRIES} <= failed
    assert not {Status.SUCCESS, Status.PENDING, Status.TIMEOUT} & failed


@pytest.mark.parametrize(
    ("interface", "slots"),
    [
        ("IND2Overlapped", 5),
        ("IND2CompletionQueue", 9),
        ("IND2SharedReceiveQueue", 9),
        ("IND2MemoryWindow", 4),
        ("IND2MemoryRegion", 9),
        ("IND2QueuePair", 10),
        ("IND2Connector", 16),
        ("IND2Listener", 9),
        ("IND2Adapter", 14),
        ("IND2Provider", 6),
    ],
)
def test_b_4_2_the_tables_of_these_tests_have_the_contracts_slots(interface, slots):
    assert len(version2.ORDER[interface]) == slots
    assert ffi.sizeof(f"{interface}_methods") == slots * 8


def test_b_3_1_a_window_answers_the_shared_identifier_with_four_slots(node):
    window = node.window()
    code, again = version2.query_interface(window, version2.IID_INDMemoryWindow)
    assert code == Status.SUCCESS
    assert isinstance(version2.Interface("IND2MemoryWindow", again).GetRemoteToken(), int)
    window.Release()


@pytest.mark.parametrize(
    ("structure", "size", "fields"),
    [
        ("ND2_ADAPTER_INFO", 96, {"AdapterId": 8, "MaxInitiatorSge": 32, "MaxCallerData": 84, "AdapterFlags": 92}),
        ("ND2_RESULT", 32, {"BytesTransferred": 4, "QueuePairContext": 8, "RequestContext": 16, "RequestType": 24}),
        ("ND2_SGE", 16, {"BufferLength": 8, "MemoryRegionToken": 12}),
        ("OVERLAPPED", 32, {"InternalHigh": 8, "Offset": 16, "hEvent": 24}),
    ],
)
def test_b_6_1_layouts(structure, size, fields):
    assert ffi.sizeof(structure) == size
    for field, offset in fields.items():
        assert ffi.offsetof(structure, field) == offset


def test_b_7_1_the_sizing_call_gives_the_size(node):
    size = ffi.new("uint32_t *", 0)
    assert node.adapter.Query(NULL, size) == Status.BUFFER_OVERFLOW
    assert size[0] >= SIZE


@pytest.mark.parametrize("given", [0, 4, 95])
def test_b_7_1_a_small_buffer_is_not_touched(node, given):
    code, size, data = query(node, given=given)
    assert (code, size) == (Status.BUFFER_OVERFLOW, SIZE)
    assert data[4:] == b"\xa5" * (len(data) - 4)


@pytest.mark.parametrize("given", [SIZE, SIZE + 40])
def test_b_7_2_exactly_the_structure_or_more_succeeds(node, given):
    code, size, data = query(node, given=given)
    assert (code, size) == (Status.SUCCESS, SIZE)
    assert data[SIZE:] == b"\xa5" * 64


@pytest.mark.parametrize("version", [1, version2.ND_VERSION_2])
def test_b_7_3_m_2_both_versions_are_accepted_and_returned(node, version):
    code, _, data = query(node, version=version)
    assert code == Status.SUCCESS
    assert int.from_bytes(data[:4], "little") == version


@pytest.mark.parametrize("version", [0, 2, 0x10000, 0x20001, 0xFFFFFFFF])
def test_b_7_3_other_versions_are_refused(node, version):
    assert query(node, version=version)[0] == Status.INVALID_PARAMETER


def test_b_7_4_and_b_7_5_limits_that_programs_count_on(node):
    info = node.info
    assert info.MaxReadSge <= info.MaxInitiatorSge
    assert info.MaxReceiveQueueDepth == info.MaxInitiatorQueueDepth < 0xFFFFFFFF
    assert info.MaxRegistrationSize >= 64 << 20
    assert info.MaxTransferLength >= 64 << 20
    assert info.InlineRequestThreshold <= info.MaxInlineDataSize
    assert info.MaxCallerData >= 56
    assert info.MaxCalleeData >= 148
    flags = AdapterFlag(info.AdapterFlags)
    assert AdapterFlag.IN_ORDER_DMA in flags
    assert AdapterFlag.LOOPBACK_CONNECTIONS in flags


def test_b_7_5_limits_of_this_provider(node):
    info = node.info
    assert info.MaxRegistrationSize >= 1 << 30
    assert info.MaxTransferLength >= 1 << 30
    assert min(info.MaxInitiatorSge, info.MaxReceiveSge, info.MaxReadSge) >= 16
    assert info.MaxReceiveQueueDepth >= 1024
    # With an odd depth, programs that advertise one less and return credits for half of it lose none.
    assert info.MaxReceiveQueueDepth // 2 == (info.MaxReceiveQueueDepth - 1) // 2
    assert info.MaxCompletionQueueDepth >= 65536
    assert info.MaxInlineDataSize >= 236


def test_b_7_5_the_largest_completion_queue_can_be_made_several_times(node):
    depth = node.info.MaxCompletionQueueDepth
    queues = [node.cq(depth) for _ in range(4)]
    assert len({queue.address for queue in queues}) == 4
