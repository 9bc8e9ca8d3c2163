"""The table of operations, as cdefs/operations.h has it."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ndpy import _core
from ndpy.vocabulary.flags import Capability, Flags
from ndpy.vocabulary.queue_pair_attributes import QueuePairType

# Those of enum operation_trait that Python looks at. Each post does, and a member of an enum is slower.
FILLS_LOCAL = 0x1
NAMES_REMOTE = 0x2
IS_ALIGNED = 0x80
# enum operation_type.
_BITS = {QueuePairType.RC: 1, QueuePairType.UC: 2, QueuePairType.UD: 4, QueuePairType.XRC_SEND: 8}
# enum ndpy_internal_flag of cdefs/ndpy_abi.h.
UNWRITABLE = 0x100
MARKER = 0x200


class Row(NamedTuple):
    """An operation.

    words: what it is in an error.
    completes_as: the Operation of its completion.
    flags: those of Flags and the internal ones that it takes. One with INLINE may be sent inline.
    types: which queue pairs take it, if the adapter has the capability, whose name is `needs`.
    rights: what it needs of the peer's memory, for an error.
    """

    name: str
    number: int
    words: str
    completes_as: int
    traits: int
    flags: int
    types: int
    needs: str
    rights: str

    @property
    def capability(self) -> Capability:
        return Capability[self.needs] if self.needs else Capability.NONE

    def is_taken_by(self, type: QueuePairType, capabilities: Capability) -> bool:
        return bool(self.types & _BITS.get(type, 0)) and self.capability in capabilities


TABLE = {row.number: row for row in (Row(*fields) for fields in _core.operations())}
_NUMBERS = {row.name: row.number for row in TABLE.values()}

RECEIVE, SEND, READ, WRITE, SEND_TO = (_NUMBERS[name] for name in ("RECEIVE", "SEND", "READ", "WRITE", "SEND_TO"))


@functools.lru_cache
def operations_of(type: QueuePairType, capabilities: Capability) -> int:
    """The operations that queue pairs of a type take, each as the bit of its number."""
    return sum(1 << row.number for row in TABLE.values() if row.is_taken_by(type, capabilities))


def words_of_flags(operation: int, type: QueuePairType) -> str:
    """The names of the flags that an operation takes, for an error."""
    flags = TABLE[operation].flags
    # A datagram overtakes reads.
    names = [
        flag.name
        for flag in (Flags.SILENT_SUCCESS, Flags.READ_FENCE, Flags.SOLICITED, Flags.INLINE)
        if flags & flag and not (type is QueuePairType.UD and flag is Flags.READ_FENCE)
    ]
    return " and ".join(filter(None, (", ".join(map(str, names[:-1])), names[-1]))) if names else "none"
