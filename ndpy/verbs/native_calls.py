"""The compiled module that calls libibverbs and librdmacm, and the exceptions for failed calls.

load() opens the two libraries.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from ndpy.errors import ProviderError, ProviderNotFoundError, from_errno
from ndpy.forking import in_child

try:
    from ndpy._verbs import ffi as ffi
    from ndpy._verbs import lib as lib
except ImportError as error:
    from ndpy.verbs import distribution

    raise ProviderNotFoundError(
        f"ndpy's extension module for verbs is missing ({error}); install ndpy with pip, or run "
        f"`python setup.py build_ext --inplace` in a checkout, for which: {distribution.read().install(distribution.HEADERS)}"
    ) from None

# For each library: the environment variable for its path, its name, and what ndpy.verbs.distribution calls it.
LIBRARIES = (
    ("NDPY_LIBIBVERBS", "libibverbs.so.1", "libibverbs"),
    ("NDPY_LIBRDMACM", "librdmacm.so.1", "librdmacm"),
)

_lock = threading.Lock()
_loaded = False


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


in_child(_renew_lock)


def load() -> None:
    """Open the libraries once. Raises ProviderNotFoundError, which names the missing library and its package."""
    global _loaded
    with _lock:
        if _loaded:
            return
        paths = [os.environ.get(variable) or name for variable, name, _ in LIBRARIES]
        reason = ffi.new("char[512]")
        failed = lib.ndpy_load(paths[0].encode(), paths[1].encode(), reason, len(reason))
        if failed:
            from ndpy.verbs import distribution

            variable, _, thing = LIBRARIES[failed - 1]
            raise ProviderNotFoundError(
                f"{paths[failed - 1]} cannot be used ({ffi.string(reason).decode(errors='replace')}); "
                f"{distribution.read().install(thing)}, or set {variable} to the library's path"
            )
        _loaded = True


def text(value: Any) -> str:
    """Return a C string as text."""
    return str(ffi.string(value).decode(errors="replace")) if value else ""


def check(operation: str, result: int, message: str = "") -> None:
    """Raise if a libibverbs call, which returns 0 or an errno, has failed."""
    if result:
        raise from_errno(operation, result if result > 0 else ffi.errno, message)


def check_errno(operation: str, result: int, message: str = "") -> None:
    """Raise if a librdmacm call, which returns 0, or -1 and sets errno, has failed."""
    if result:
        raise from_errno(operation, ffi.errno, message)


def check_pointer(operation: str, pointer: Any, explain: Any = None) -> Any:
    """Return the pointer. Raise if it is NULL. explain(errno) may return the exception."""
    if pointer == ffi.NULL:
        number = ffi.errno
        error: ProviderError | None = explain(number) if explain else None
        raise error or from_errno(operation, number)
    return pointer
