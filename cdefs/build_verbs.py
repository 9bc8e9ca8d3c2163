"""The cffi module ndpy._verbs: libibverbs and librdmacm, declared from their headers, opened at run time.

Each function that verbs/ibverbs.h, verbs/newer.h, verbs/rdmacm.h and verbs/softverbs.h declare becomes a pointer for
each library, and loader.c fills it. The function is required unless its declaration is marked optional. Its name
becomes a macro that calls the function in the library of its first argument, so the module links to no library.
"""

import re
import sys
from pathlib import Path
from runpy import run_path
from typing import NamedTuple

from cffi import FFI

HERE = Path(__file__).parent


# The files that declare functions of the libraries.
LIBRARIES = ("ibverbs", "newer", "rdmacm", "softverbs")


def read(name: str) -> str:
    return (HERE / name).read_text()


# The types whose objects lead to their library, and how loader.c finds it.
OBJECTS = {
    "ibv_context": "of_context",
    "ibv_pd": "of_pd",
    "ibv_mr": "of_mr",
    "ibv_comp_channel": "of_comp_channel",
    "ibv_cq": "of_cq",
    "ibv_srq": "of_srq",
    "ibv_qp": "of_qp",
    "ibv_ah": "of_ah",
    "rdma_event_channel": "of_event_channel",
    "rdma_cm_id": "of_cm_id",
}


class Symbol(NamedTuple):
    """A function of one of the libraries. parameters: their declarations."""

    library: str
    name: str
    parameters: list[str]
    required: bool

    def macro(self) -> str:
        """What calls it in the library of its object."""
        names = [f"a{number}" for number in range(len(self.parameters))]
        first = re.match(r"struct (\w+) \*\w+$", self.parameters[0]) if self.parameters else None
        found = OBJECTS.get(first[1]) if first else None
        library = f"{found}(a0)" if found else "of_none()"
        listed = ", ".join(names)
        return f"#undef {self.name}\n#define {self.name}({listed}) ({library}->call_{self.name}({listed}))"


def symbols(library: str) -> list[Symbol]:
    """Every function that a declaration file declares."""
    found = re.findall(r"^[^/\n]*?\b(\w+)\(([^;]*)\);(.*)$", read(f"verbs/{library}.h"), re.MULTILINE)
    return [
        Symbol(
            library,
            name,
            [] if inside == "void" else [" ".join(part.split()) for part in inside.split(",")],
            "optional" not in remark,
        )
        for name, inside, remark in found
    ]


def source() -> str:
    table = [symbol for library in LIBRARIES for symbol in symbols(library)]
    entries = " \\\n".join(f"    SYMBOL({each.library}, {each.name}, {int(each.required)})" for each in table)
    macros = "\n".join(each.macro() for each in table)
    return f"""
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

/* Function-like macros of the headers; the functions behind them are what the library exports. */
#undef ibv_get_device_list
#undef ibv_query_port
#undef ibv_reg_mr

#define NDPY_SYMBOLS(SYMBOL) \\
{entries}

#include "ndpy_abi.h"
#include "verbs/newer.h"
#include "verbs/softverbs.h"
#include "verbs/shim.h"
#include "verbs/loader.c"

{macros}

#include "rings.c"
#include "verbs/events.c"
#include "verbs/connecting.c"
#include "verbs/data_path.c"
#include "verbs/lists.c"
#include "verbs/provider.c"
#include "verbs/extended.c"
#include "verbs/userfaultfd.c"
"""


ffibuilder = FFI()
ffibuilder.cdef(run_path(str(HERE / "operations.py"))["declaration"]())
for part in ("ndpy_abi.h", *(f"verbs/{library}.h" for library in LIBRARIES), "verbs/shim.h"):
    ffibuilder.cdef(read(part))
ffibuilder.set_source(
    "ndpy._verbs",
    source(),
    include_dirs=[str(HERE)],
    depends=[str(path) for path in sorted(HERE.glob("**/*.[ch]"))],
    py_limited_api=True,
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wno-unused-parameter"],
)

if __name__ == "__main__":
    # For a compiler that setuptools does not run. The argument is the path of the C file.
    ffibuilder.emit_c_code(sys.argv[1])
