"""A shared receive queue whose provider the test plays itself. fake_verbs.c has none."""

from __future__ import annotations

from typing import Any

from ndpy.platforms.verbs.native_calls import ffi, lib
from ndpy.platforms.verbs.shared_receive_queue import VerbsSharedReceiveQueue


class PlayedSharedQueue(VerbsSharedReceiveQueue):
    """Its provider gives each receive to posted()."""

    def posted(self) -> int:
        return 0

    def _native_provider(self) -> Any:
        posted = ffi.callback(
            "int(struct ndpy_shared_queue *, uint32_t, uint64_t, struct ndpy_element *, uint32_t)",
            lambda *_: self.posted(),
        )
        provider = ffi.new("struct ndpy_provider *", lib.ndpy_provider_table()[0])
        provider.post_shared = posted
        self._played = provider, posted
        return provider
