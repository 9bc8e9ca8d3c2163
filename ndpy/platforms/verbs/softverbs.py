"""softverbs, the software adapter soft0 of this package: where its libraries are, and who asks for it.

softverbs needs no kernel module and no privileges. It stands in for hardware, so ndpy takes it only where somebody
names it: the environment variable NDPY_ADAPTER, an argument, or `ndpy soft run`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ndpy import errors

#: The name of the adapter.
NAME = "soft0"
#: AdapterInfo.driver of the adapter.
DRIVER = "softverbs"
#: The library, and the two names under which programs load it. Each of these brings in the library and has no code.
LIBRARY = "libsoftverbs.so"
IBVERBS = "libibverbs.so.1"
RDMACM = "librdmacm.so.1"
#: A function that no other libibverbs has.
MARK = b"softverbs_addresses"

#: How to use it instead of an adapter, for remedies.
HINT = f"NDPY_ADAPTER={NAME} takes the software adapter of this package (`ndpy smoke {NAME}` tries it)"

_FOLDER = Path(__file__).resolve().parent / "soft"


def folder(place: Path = _FOLDER) -> Path:
    """Return the folder of the libraries. Raises ProviderNotFoundError, which says how to get them."""
    if all((place / name).is_file() for name in (LIBRARY, IBVERBS, RDMACM)):
        return place
    checkout = place.parents[3]
    if (checkout / "softrdma" / "Makefile").is_file():
        raise errors.ProviderNotFoundError(
            f"softverbs, the library of {NAME}, is not built; run `make softverbs` in {checkout} (needs a C compiler "
            "and the headers of libibverbs and librdmacm)"
        )
    raise errors.ProviderNotFoundError(
        f"this installation of ndpy has no softverbs, the library of {NAME}; ndpy's wheels for Linux contain it: "
        "install ndpy again with pip"
    )


def environment(folder: Path, former: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program that uses the libraries in this folder instead of the system's."""
    library = str(folder / LIBRARY)
    # An empty entry would mean the working folder.
    path = ":".join(entry for entry in (str(folder), former.get("LD_LIBRARY_PATH", "")) if entry)
    return {
        **former,
        "LD_LIBRARY_PATH": path,
        "NDPY_LIBIBVERBS": library,
        "NDPY_LIBRDMACM": library,
        "NDPY_ADAPTER": former.get("NDPY_ADAPTER") or NAME,
    }


def is_there() -> bool:
    """Whether this installation has softverbs."""
    try:
        folder()
    except errors.ProviderNotFoundError:
        return False
    return True


def hint() -> str:
    """HINT, or "" if this installation has no softverbs, or the environment asks for it anyway."""
    return HINT if is_there() and not is_asked_for() else ""


def is_listed_by_name_only(which: str | None) -> bool:
    """Whether this names soft0, perhaps with its port. list_adapters() lists it only if the environment names it."""
    return which is not None and NAME in (which, which.rpartition(":")[0])


def describe_unlisted() -> dict[str, str]:
    """A sentence about soft0, by its name, if this installation has it."""
    sentence = (
        f"{NAME}, the software adapter of this package (iWARP over TCP), is there too. It is taken only by name: "
        f"`ndpy smoke {NAME}`, NDPY_ADAPTER={NAME}, or `ndpy soft run -- COMMAND`"
    )
    return {NAME: sentence} if is_there() else {}


def is_asked_for() -> bool:
    """Whether the environment asks for soft0."""
    return is_listed_by_name_only(os.environ.get("NDPY_ADAPTER"))
