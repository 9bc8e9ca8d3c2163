"""docs/aio_protocol.md says what ndpy/aio/protocol.py does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ndpy.aio import connection, protocol
from ndpy.aio.protocol import Hello, Kind, Protocol
from ndpy.objects.memory import RemoteMemory

TEXT = (Path(__file__).parents[2] / "docs/aio_protocol.md").read_text("utf-8")
# The document in one line for each paragraph.
PROSE = re.sub(r"(?<!\n)\n(?!\n)\s*", " ", TEXT)


def table(heading: str, columns: str) -> list[list[str]]:
    """The rows of the first table below a heading that begins with these columns."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = section.split(f"| {columns}")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def fields(heading: str) -> dict[str, tuple[int, int]]:
    """(offset, bytes) of each field of a layout."""
    return {
        re.split(r"[:,]", contents)[0]: (int(offset), int(size))
        for offset, size, contents in table(heading, "offset | bytes |")
    }


def number(data: bytes, place: tuple[int, int]) -> int:
    return int.from_bytes(data[place[0] : sum(place)], "big")


@pytest.mark.parametrize(
    ("heading", "length"), [("Private data", protocol.HELLO_LENGTH), ("Frames", protocol.HEADER_LENGTH)]
)
def test_the_fields_follow_each_other(heading, length):
    place = 0
    for offset, size, _ in table(heading, "offset | bytes |"):
        assert int(offset) == place
        place += int(size)
    assert place == length
    assert f"{length} bytes" in TEXT.split(f"\n## {heading}\n")[1].split("|")[0]


def test_private_data():
    data = Hello(slots=11, offers=12, slot_size=1300, max_message_length=1400, invalidates=True).to_bytes()
    places = fields("Private data")
    assert {name: number(data, place) for name, place in places.items() if place[0] and name != "zero"} == {
        "version": 1,
        "bits": 3,
        "slots": 11,
        "offers": 12,
        "slot size": 1300,
        "the longest message that this end takes": 1400,
    }
    assert data[:4] == re.search(r"\| 0 \| 4 \| `(\w+)`, in ASCII", TEXT)[1].encode()


def test_the_version():
    assert TEXT.startswith(f"# The protocol of ndpy.aio, version {protocol.VERSION}\n")


def test_the_limits():
    rows = {row[2].split(":")[0]: row[2] for row in table("Private data", "offset | bytes |")}
    for name, least, most in (
        ("slots", 1, protocol.MAX_SLOTS),
        ("offers", 1, protocol.MAX_OFFERS),
        ("slot size", protocol.MIN_SLOT_SIZE, protocol.MAX_SLOT_SIZE),
    ):
        assert re.search(rf"\b{least} to {most}\b", rows[name]), rows[name]


def test_a_header():
    ends = (
        Protocol(Hello(8, 2, 256, 1000), Hello(5, 2, 256, 1000)),
        Protocol(Hello(5, 2, 256, 1000), Hello(8, 2, 256, 1000)),
    )
    ends[0].receive(memoryview(ends[1].start()))
    _, data = ends[0].offer(RemoteMemory(1, 999, 2))
    assert {name: number(data, place) for name, place in fields("Frames").items()} == {
        "kind": Kind.OFFER,
        "zero": 0,
        "number of the offer that the frame is about": 1,
        "granted": 8,
        "seen": 5,
        "length": 999,
    }
    assert len(data) == protocol.HEADER_LENGTH + protocol.DESCRIPTOR_LENGTH


def test_the_kinds_of_frames():
    rows = table("Frames", "kind | name |")
    assert {name: int(kind) for kind, name, *_ in rows} == {kind.name: kind.value for kind in Kind}
    assert {name for _, name, about, *_ in rows if about == "yes"} == {kind.name for kind in protocol._ABOUT_AN_OFFER}
    assert f"Kinds {Kind.MESSAGE.value} and {Kind.OFFER.value} are data frames." in TEXT
    assert {Kind.MESSAGE, Kind.OFFER} == set(protocol._DATA)
    for _, name, _, length, follows in rows:
        if name not in ("MESSAGE", "OFFER"):
            assert (length, follows) == ("0", "nothing")
        else:
            assert length.startswith("of the message")
    assert f"a descriptor of {protocol.DESCRIPTOR_LENGTH} bytes" in TEXT


@pytest.mark.parametrize("offers", [1, 2, 64])
def test_the_receives_for_control_frames(offers):
    fixed, each = map(int, re.search(r"- (\d+) \+ (\d+) \* offers for control frames", TEXT).groups())
    assert Protocol.control_frames(offers, offers) == fixed + each * offers


def test_the_numbers_of_offers():
    assert f"{protocol._MASK} is followed by 1, because 0 stands for no offer." in PROSE


def test_the_time_to_linger():
    assert f"The other one waits {connection._LINGER_S:g} s for that" in PROSE


def test_the_length_of_a_message():
    assert f"at most the slot size less {protocol.HEADER_LENGTH} bytes" in PROSE
    assert Protocol(Hello(1, 1, 200, 1), Hello(1, 1, 100, 1)).longest_frame == 100 - protocol.HEADER_LENGTH
