"""C programs on plain verbs that tests run. Each is compiled once and kept in .rig/programs.

`python tests/kit/programs.py` compiles all of them. Each takes a second here, and five to ten in the emulated machine.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from kit.compiling import compiled, compiler, has_compiler

_TESTS = Path(__file__).parents[1]
_BUILT = _TESTS.parent / ".rig/programs"
_FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")
_LIBRARIES = ("-Wl,--as-needed", "-libverbs", "-lrdmacm", "-lpthread")


def can_be_built() -> bool:
    """Whether this machine has the compiler and the header that the programs need."""
    return has_compiler() and Path("/usr/include/infiniband/verbs.h").exists()


def built(source: Path, *options: str) -> Path:
    """Return the program for this machine, linked with libibverbs, librdmacm and these options.

    The test skips without a compiler, and fails if the program does not compile.
    """
    if not can_be_built():
        pytest.skip("this needs gcc and libibverbs-dev")
    read = [source, *sorted(source.parent.glob("*.h"))]
    how = (compiler(), _FLAGS, options, _LIBRARIES)
    key = hashlib.sha256(b"".join(path.read_bytes() for path in read) + repr(how).encode())
    path = _BUILT / f"{source.stem}-{key.hexdigest()[:16]}"
    if not path.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"{path.name}.{os.getpid()}")
        compiled(draft, *_FLAGS, source, *options, *_LIBRARIES, timeout_s=120).replace(path)
    return path


if __name__ == "__main__" and can_be_built():
    for folder in ("verbs", "interop"):
        for program in (_TESTS / folder / "programs").glob("*.c"):
            built(program)
