"""RemoteMemory and its 20 bytes, which Windows and Linux peers read alike."""

from __future__ import annotations

import pytest

from ndpy import RemoteMemory


def test_the_bytes_are_base_length_and_token_in_network_order():
    """ND_MW_DESCRIPTOR: UINT64 base, UINT64 length, UINT32 token."""
    memory = RemoteMemory(0x0102030405060708, 0x1112131415161718, 0x21222324)
    assert memory.to_bytes() == bytes.fromhex("0102030405060708 1112131415161718 21222324")
    assert len(memory.to_bytes()) == 20


@pytest.mark.parametrize(
    "memory",
    [
        RemoteMemory(0, 0, 0),
        RemoteMemory(0x7F00_1234_5000, 4096, 0xDEADBEEF),
        RemoteMemory((1 << 64) - 1, 1, 0xFFFFFFFF),
    ],
)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_come_back_as_the_same_memory(memory, kind):
    again = RemoteMemory.from_bytes(kind(memory.to_bytes()))
    assert again == memory
    assert hash(again) == hash(memory)
    assert (again.address, again.length, again.token) == (memory.address, memory.length, memory.token)


@pytest.mark.parametrize("length", [0, 19, 21, 40])
def test_other_than_20_bytes_are_refused(length):
    with pytest.raises(ValueError, match=str(length)):
        RemoteMemory.from_bytes(bytes(length))


def test_a_range_past_the_address_space_is_refused():
    data = ((1 << 64) - 10).to_bytes(8, "big") + (11).to_bytes(8, "big") + bytes(4)
    with pytest.raises(ValueError, match="address space"):
        RemoteMemory.from_bytes(data)


def test_going_on_from_slice_to_slice_keeps_the_whole_memory_only():
    whole = piece = RemoteMemory(1000, 1 << 20, 7)
    for _ in range(1000):
        piece = piece[8:]
        assert piece._sliced_from is whole
    assert piece == RemoteMemory(1000 + 8000, (1 << 20) - 8000, 7)


def test_memories_compare_by_value():
    assert RemoteMemory(1, 2, 3) == RemoteMemory(1, 2, 3)
    assert RemoteMemory(1, 2, 3) != RemoteMemory(1, 2, 4)
    assert RemoteMemory(1, 2, 3) != (1, 2, 3)
    assert "token=0x3" in repr(RemoteMemory(1, 2, 3))
