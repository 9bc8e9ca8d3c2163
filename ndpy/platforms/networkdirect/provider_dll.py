"""Loads a provider's DLL. Asks it for versions, adapters and addresses, and opens adapters."""

from __future__ import annotations

import os
import threading
import uuid
from typing import Any, ClassVar

from ndpy import errors
from ndpy.platforms.networkdirect import dll_header
from ndpy.platforms.networkdirect.addresses import address_list, pack_address, unpack_address
from ndpy.platforms.networkdirect.native_calls import check, create, ffi, lib, release, win32_error
from ndpy.vocabulary.loggers import logger

_log = logger("ndpy.adapters")

# The class object of each version. DllGetClassObject gives it (contract A.3.1, A.3.2).
_CLASS_OBJECTS = {2: "IND2Provider", 1: "IClassFactory"}

# The identifier for a provider that is named by its path. Such a provider must not insist on its own (contract A.3.1).
NO_ID = str(uuid.UUID(int=0))


class Provider:
    """A loaded provider DLL, and a count of its users.

    When the last user drops it, it is unloaded if it says that it can be (contract A.4).
    """

    _loaded: ClassVar[dict[str, Provider]] = {}
    _lock = threading.Lock()

    def __init__(self, path: str) -> None:
        self.path = path
        self._users = 0
        failure, missing = ffi.new("uint32_t *"), ffi.new("const char **")
        self._library = lib.ndpy_load_provider(path, failure, missing)
        _log.debug("loading the provider %s: %s", path, "failed" if self._library == ffi.NULL else "done")
        if self._library == ffi.NULL:
            if missing[0]:
                export = ffi.string(missing[0]).decode()
                raise errors.ProviderNotFoundError(
                    f"{path} is not a NetworkDirect provider: it does not export {export}"
                )
            raise errors.ProviderNotFoundError(f"{_why_not_loaded(path, failure[0])}")

    @classmethod
    def use(cls, path: str) -> Provider:
        """Return the provider at a path, and load it if necessary. Call drop() after use."""
        with cls._lock:
            provider = cls._loaded.get(path)
            if provider is None:
                provider = cls._loaded[path] = cls(path)
            provider._users += 1
            return provider

    def drop(self) -> None:
        """Count one user less. Unload the DLL after the last one."""
        with self._lock:
            self._users -= 1
            if self._users == 0 and lib.ndpy_can_unload(self._library) == 0:
                del self._loaded[self.path]
                lib.ndpy_unload_provider(self._library)

    def class_object(self, interface: str, provider_id: str) -> Any:
        """Call DllGetClassObject. Returns an IND2Provider, or the IClassFactory of version 1 (contract A.3)."""
        out = ffi.new("void **")
        status = lib.ndpy_get_class_object(
            self._library, uuid.UUID(provider_id).bytes_le, lib.ndpy_iid(interface.encode()), out
        )
        check("load provider", status, f"{self.path} gives no {interface}")
        if out[0] == ffi.NULL:
            raise errors.ProviderError(
                f"{self.path} reports success, but gave no {interface}", operation="load provider"
            )
        return ffi.cast(f"struct {interface} *", out[0])

    def version(self, asked: int | None, provider_id: str = NO_ID) -> int:
        """Return the version to use: the one that is asked for. Without one, 2 if the provider serves it, otherwise 1.

        Raises UnsupportedError if the provider serves only the other version, and ProviderError if it serves neither.
        """
        failures: dict[int, errors.ProviderError] = {}
        for version, interface in _CLASS_OBJECTS.items():
            try:
                release(self.class_object(interface, provider_id))
            except errors.ProviderError as failure:
                failures[version] = failure.with_traceback(None)
            else:
                if asked in (None, version):
                    return version
        if asked is None or len(failures) == len(_CLASS_OBJECTS):
            raise failures.pop(2)
        raise errors.UnsupportedError(
            f"{self.path} serves NetworkDirect version {3 - asked} only",
            operation="load provider",
            native=failures[asked].native,
        )

    def serves(self, version: int, provider_id: str = NO_ID) -> bool:
        """Return whether the provider has the class object of a version."""
        try:
            release(self.class_object(_CLASS_OBJECTS[version], provider_id))
        except errors.ProviderError:
            return False
        return True

    def adapters(self, provider_id: str = NO_ID) -> dict[int, list[str]]:
        """Return the addresses of each adapter of version 2. The keys are the provider's numbers for the adapters."""
        native = self.class_object("IND2Provider", provider_id)
        found: dict[int, list[str]] = {}
        try:
            listed = address_list(
                "list addresses", lambda out, size: lib.IND2Provider_QueryAddressList(native, out, size)
            )
            for data in listed:
                address = unpack_address(data)
                number = ffi.new("uint64_t *")
                if address and not lib.IND2Provider_ResolveAddress(native, data, len(data), number):
                    found.setdefault(int(number[0]), []).append(address[0])
        except errors.ProviderError as failure:
            raise self.named(failure) from None
        finally:
            release(native)
        return found

    def open(self, adapter_id: int, addresses: tuple[str, ...], provider_id: str = NO_ID) -> Any:
        """Open an adapter and return its IND2Adapter."""
        native = self.class_object("IND2Provider", provider_id)
        try:
            # A provider knows the number only after it has resolved the address in this process.
            if addresses:
                packed = pack_address((addresses[0], 0))
                lib.IND2Provider_ResolveAddress(native, packed, len(packed), ffi.new("uint64_t *"))
            return create("open adapter", "IND2Adapter", lib.IND2Provider_OpenAdapter, native, adapter_id)
        except errors.ProviderError as failure:
            raise self.named(failure) from None
        finally:
            release(native)

    def named(self, failure: errors.ProviderError) -> errors.ProviderError:
        """Return the same failure with a message that names the provider."""
        return type(failure)(
            f"{self.path}: {failure.message}",
            operation=failure.operation,
            native=failure.native,
            native_name=failure.native_name,
        )


def _why_not_loaded(path: str, number: int) -> str:
    if not os.path.exists(path):
        return f"the NetworkDirect provider {path} does not exist"
    bits = dll_header.bitness(path)
    if bits:
        return f"{path} cannot be loaded: {bits}"
    return str(win32_error("load provider", number, f"{path} cannot be loaded"))
