"""The cffi module ndpy._verbs: libibverbs and librdmacm, declared from their headers, opened at run time.

Each function that verbs/ibverbs.h and verbs/rdmacm.h declare becomes a pointer, and loader.c fills it. The function is
required unless its declaration is marked optional. Its name becomes a macro for the pointer, so the module links to no
library.
"""

import re
import sys
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent


def read(name: str) -> str:
    return (HERE / name).read_text()


def symbols(library: str) -> list[tuple[str, str, int]]:
    """Every function that a declaration file declares, as (library, name, required)."""
    found = re.findall(r"^[^/\n]*?\b(\w+)\((?:[^;]*)\);(.*)$", read(f"verbs/{library}.h"), re.MULTILINE)
    return [(library, name, int("optional" not in remark)) for name, remark in found]


def source() -> str:
    table = symbols("ibverbs") + symbols("rdmacm")
    entries = " \\\n".join(f"    SYMBOL({library}, {name}, {required})" for library, name, required in table)
    names = "\n".join(f"#undef {name}\n#define {name} ndpy_call_{name}" for _, name, _ in table)
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
#include "verbs/shim.h"
#include "verbs/loader.c"

{names}

#include "rings.c"
#include "verbs/events.c"
#include "verbs/connecting.c"
#include "verbs/data_path.c"
#include "verbs/lists.c"
#include "verbs/provider.c"
#include "verbs/userfaultfd.c"
"""


ffibuilder = FFI()
for part in ("ndpy_abi.h", "verbs/ibverbs.h", "verbs/rdmacm.h", "verbs/shim.h"):
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
