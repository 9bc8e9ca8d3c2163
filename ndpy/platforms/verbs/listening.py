"""Identifiers that listen at all addresses that a listener stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ndpy import errors
from ndpy.platforms.verbs.addresses import bind_identifier, new_identifier, unpack_address
from ndpy.platforms.verbs.native_calls import check_errno, lib
from ndpy.vocabulary.addresses import Address, listening_addresses

if TYPE_CHECKING:
    from ndpy.platforms.verbs.adapter import VerbsAdapter

# How often another port is tried if a free one of the first address is taken at the next.
_TRIES = 16


class Ears:
    """Listening identifiers with one key and one port. address: that of the first."""

    def __init__(
        self, adapter: VerbsAdapter, key: int, address: Address, backlog: int, *, datagrams: bool = False
    ) -> None:
        self._identifiers: list[Any] = []
        wanted = listening_addresses(adapter.info.addresses, address)
        for left in reversed(range(_TRIES)):
            try:
                self.address = self._open(adapter, key, wanted, backlog, datagrams)
                return
            except errors.AddressInUseError:
                self._discard()
                if address[1] or not left or len(wanted) == 1:
                    raise
            except BaseException:
                self._discard()
                raise

    def _open(self, adapter: VerbsAdapter, key: int, wanted: list[Address], backlog: int, datagrams: bool) -> Address:
        first: Address | None = None
        for host, port in wanted:
            identifier = new_identifier(adapter, key, datagrams)
            self._identifiers.append(identifier)
            try:
                bind_identifier(adapter, identifier, (host, first[1] if first else port))
                check_errno("listen", lib.rdma_listen(identifier, backlog), f"cannot listen at {host} port {port}")
            except errors.AddressUnreachableError:
                # One of several may not be usable yet, or may have gone since the adapter was opened.
                if first is None and (host, port) == wanted[-1]:
                    raise
                lib.rdma_destroy_id(self._identifiers.pop())
                continue
            if first is None:
                first = unpack_address(identifier, peer=False)
        assert first is not None
        return first

    def _discard(self) -> None:
        while self._identifiers:
            lib.rdma_destroy_id(self._identifiers.pop())

    def close(self) -> int:
        """End them. Returns 0, or the result of the one that stays."""
        while self._identifiers:
            if result := int(lib.rdma_destroy_id(self._identifiers[-1])):
                return result
            self._identifiers.pop()
        return 0
