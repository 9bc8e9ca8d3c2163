"""The compiled module that calls libibverbs and librdmacm, and the exceptions for failed calls.

load() opens the two libraries, and load_for() those of an adapter: the system's, or softverbs. After load_shim() both
are there through the shim too, which makes faults. load_for() takes these between begin_faults() and end_faults().
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ndpy.errors import ProviderError, ProviderNotFoundError, from_errno, lacks_descriptor
from ndpy.platforms.verbs import softverbs
from ndpy.vocabulary.descriptors import owned
from ndpy.vocabulary.flags import Capability
from ndpy.vocabulary.forking import in_child
from ndpy.vocabulary.loggers import logger

try:
    from ndpy._verbs import ffi as ffi
    from ndpy._verbs import lib as lib
except ImportError as error:
    from ndpy.platforms.verbs import distribution

    raise ProviderNotFoundError(
        f"ndpy's extension module for verbs is missing ({error}); install ndpy with pip, or run "
        f"`python setup.py build_ext --inplace` in a checkout, for which: "
        f"{distribution.read().install(distribution.HEADERS)}"
    ) from None

_log = logger("ndpy.adapters")

# For each library: the environment variable for its path, its name, and what ndpy.platforms.verbs.distribution calls
# it.
LIBRARIES = (
    ("NDPY_LIBIBVERBS", "libibverbs.so.1", "libibverbs"),
    ("NDPY_LIBRDMACM", "librdmacm.so.1", "librdmacm"),
)

_lock = threading.Lock()
_loaded = False
_softverbs_loaded = False
_shim_loaded = False
# The libraries that were loaded through the shim, and lib.NDPY_FAULTY while there is a scenario.
_faulty_loaded: set[int] = set()
_faulty = 0


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()


in_child(_renew_lock)


def load() -> None:
    """Open the system's libraries, or those that the environment names, once.

    Raises ProviderNotFoundError, which names the missing library and its package, and InsufficientResourcesError
    without a free file descriptor.
    """
    global _loaded
    with _lock:
        if _loaded:
            return
        paths = _paths(lib.NDPY_SYSTEM)
        failed, reason = _load(lib.NDPY_SYSTEM, paths)
        if failed:
            from ndpy.platforms.verbs import distribution

            variable, _, thing = LIBRARIES[failed - 1]
            without = f", or do without: {hint}" if (hint := softverbs.hint()) else ""
            raise ProviderNotFoundError(
                f"{paths[failed - 1]} cannot be used ({reason}); {distribution.read().install(thing)}, or set "
                f"{variable} to the library's path{without}"
            )
        _loaded = True


def _load(library: int, paths: list[str]) -> tuple[int, str]:
    """The number of the path that cannot be used, counted from 1, and the reason. 0 if both can."""
    reason = ffi.new("char[512]")
    failed = lib.ndpy_load(library, paths[0].encode(), paths[1].encode(), reason, len(reason))
    said = ffi.string(reason).decode(errors="replace")
    _log.debug("loading %s: %s", " and ".join(dict.fromkeys(paths)), said if failed else "done")
    if failed:
        _blame_descriptors(paths[failed - 1])
    return failed, said


def _blame_descriptors(path: str) -> None:
    """Raises InsufficientResourcesError if this process can open no file at all.
    Nothing is wrong with this one then.
    """
    if number := lacks_descriptor():
        raise from_errno("open adapter", number, f"{path} cannot be loaded")


def load_for(name: str) -> int:
    """Open the libraries of the adapter of this name. Returns the number of the libraries.

    Raises ProviderNotFoundError.
    """
    library = _load_for(name)
    if not _faulty:
        return library
    with _lock:
        if library not in _faulty_loaded:
            failed, reason = _load(library | lib.NDPY_FAULTY, _paths(library))
            if failed:
                raise ProviderNotFoundError(f"the libraries of {name} cannot be used through the shim ({reason})")
            _faulty_loaded.add(library)
    return library | _faulty


def _paths(library: int) -> list[str]:
    if library == lib.NDPY_SOFTVERBS:
        return [str(softverbs.folder() / softverbs.LIBRARY)] * 2
    return [os.environ.get(variable) or name for variable, name, _ in LIBRARIES]


def _load_for(name: str) -> int:
    global _softverbs_loaded
    if name != softverbs.NAME:
        load()
        return int(lib.NDPY_SYSTEM)
    with _lock:
        if _softverbs_loaded:
            return int(lib.NDPY_SOFTVERBS)
        loaded = _loaded
    if loaded or os.environ.get(LIBRARIES[0][0]):
        load()
        if lib.ndpy_has_symbol(lib.NDPY_SYSTEM, softverbs.MARK):
            # The process has softverbs in place of the system's libraries. A second copy would have another state.
            return int(lib.NDPY_SYSTEM)
    paths = _paths(lib.NDPY_SOFTVERBS)
    with _lock:
        failed, reason = _load(lib.NDPY_SOFTVERBS, paths)
        if failed:
            raise ProviderNotFoundError(f"{paths[0]} cannot be used ({reason}); install ndpy again")
        _softverbs_loaded = True
    return int(lib.NDPY_SOFTVERBS)


def load_shim(path: str) -> None:
    """Open the library that makes faults, once. It starts its thread, and stays.

    Raises ProviderNotFoundError.
    """
    global _shim_loaded
    with _lock:
        if _shim_loaded:
            return
        reason = ffi.new("char[512]")
        if lib.ndpy_load_shim(path.encode(), reason, len(reason)):
            _blame_descriptors(path)
            raise ProviderNotFoundError(f"{path} cannot be used ({text(reason)})")
        _shim_loaded = True


def begin_faults(path: str) -> None:
    """Let adapters that are opened from now on have the faults of a scenario in the plain form. load_shim() was called.

    Raises ValueError, which says what is wrong with the scenario.
    """
    global _faulty
    reason = ffi.new("char[1024]")
    if lib.ndpy_begin_faults(path.encode(), reason, len(reason)):
        raise ValueError(text(reason))
    _faulty = int(lib.NDPY_FAULTY)


def end_faults() -> None:
    """End the scenario. Adapters that were opened meanwhile stay as they are, and no more faults happen."""
    global _faulty
    _faulty = 0
    lib.ndpy_end_faults()


def softverbs_only() -> bool:
    """Whether the process uses softverbs and not the system's libraries."""
    return _softverbs_loaded and not _loaded


def has_symbol(name: bytes, library: int = lib.NDPY_SYSTEM) -> bool:
    """Whether the libraries have a function that is optional. library: a number that load_for() returned."""
    return bool(lib.ndpy_has_symbol(library, name))


def newer_operations(capabilities: Capability) -> int:
    """The operations that a queue pair has to be created for, as enum ndpy_newer_operation. 0 if ibv_post_send(3) has
    them all.
    """
    atomic_write = lib.NDPY_WITH_ATOMIC_WRITE if Capability.ATOMIC_WRITE in capabilities else 0
    return int(atomic_write | (lib.NDPY_WITH_FLUSH if Capability.FLUSH in capabilities else 0))


def text(value: Any) -> str:
    """Return a C string as text."""
    return str(ffi.string(value).decode(errors="replace")) if value else ""


def check(operation: str, result: int, message: str = "") -> None:
    """Raise if a libibverbs call, which returns 0 or an errno, has failed."""
    if result:
        raise from_errno(operation, result if result > 0 else ffi.errno, message)


def free_once(owner: Any, field: str, operation: str, call: Callable[[Any], int], none: Any = None) -> None:
    """Free the native object in a field of its owner. Harmless when repeated. If the provider refuses, the field has it
    still.

    Ctrl-C may come after the object has gone. Nobody may free it a second time. So the field has `none` during the
    call.
    """
    native = getattr(owner, field)
    if native == none:
        return
    is_called = False
    try:
        # Ctrl-C may come between these two as well. Then nothing was freed.
        setattr(owner, field, none)
        is_called = True
        check(operation, call(native))
    except BaseException as error:
        if not is_called or isinstance(error, ProviderError):
            setattr(owner, field, native)
        raise


def free_region(region: Any) -> int:
    """Deregister a region that only this call knows. Returns 0, or an errno if the provider refuses twice.

    After a refusal the region is as before, and nobody else can try again.
    """
    return int(lib.ibv_dereg_mr(region) and lib.ibv_dereg_mr(region))


def check_errno(operation: str, result: int, message: str = "") -> None:
    """Raise if a librdmacm call, which returns 0, or -1 and sets errno, has failed."""
    if result:
        raise from_errno(operation, ffi.errno, message)


def new_eventfd(operation: str) -> io.FileIO:
    """An eventfd that does not block, and its owner. Raises as the provider's calls do."""
    with system_calls(operation):
        return owned(os.eventfd, 0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


@contextlib.contextmanager
def system_calls(operation: str) -> Iterator[None]:
    """Let what the system refuses be an error of this operation."""
    try:
        yield
    except OSError as error:
        raise from_errno(operation, error.errno or 0) from error


def new_pointer(operation: str, call: Any, *arguments: Any) -> Any:
    """Return the pointer that a native call gives. Raise if it is NULL.

    The errno of an older failure is not reported: drivers' libraries may refuse without setting it.
    """
    ffi.errno = 0
    return check_pointer(operation, call(*arguments))


def check_pointer(operation: str, pointer: Any, explain: Any = None) -> Any:
    """Return the pointer. Raise if it is NULL. explain(errno) may return the exception."""
    if pointer == ffi.NULL:
        number = ffi.errno
        error: ProviderError | None = explain(number) if explain else None
        raise error or from_errno(operation, number)
    return pointer
