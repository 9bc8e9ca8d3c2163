"""The cffi module ndpy._networkdirect: NetworkDirect 2 and 1, and the Win32 calls.

The tables in networkdirect/interfaces.h and networkdirect/version1/interfaces.h are the only place that names a method.
Its vtable, its interface's identifier and the thunk that calls it are made from them.
"""

import re
import sys
import uuid
from pathlib import Path
from runpy import run_path

from cffi import FFI

HERE = Path(__file__).parent

_INTERFACE = re.compile(r"/\* interface (\w+)(?: : (\w+))?, (\d+) slots \{([0-9A-F-]+)\} \*/")
_METHOD = re.compile(r"^(\w+(?: \*| ))(\w+?)_(\w+)\(([^;]*)\);", re.MULTILINE)


def read(name: str) -> str:
    return (HERE / name).read_text()


def thunks(table: str) -> str:
    """The C code for each interface of a table: a vtable, a check of its number of slots, and a function per method."""
    parts: list[str] = []
    entries: list[str] = []
    methods: dict[str, list[str]] = {}
    for found in _INTERFACE.finditer(table):
        name, base, slots, identifier = found.groups()
        stop = table.find("/* interface ", found.end())
        own = _METHOD.findall(table[found.end() : stop if stop > 0 else None])
        assert own and all(interface == name for _, interface, _, _ in own), name
        fields, bodies = [], []
        for result, _, method, parameters in own:
            parameters = " ".join(parameters.split())
            names = ", ".join(re.findall(r"(\w+)(?:,|$)", parameters))
            rest = parameters.split(",", 1)[1:]
            signature = ",".join(["void *self", *rest])
            fields.append(f"    {result}(STDMETHODCALLTYPE *{method})({signature});")
            call = f"{'' if result == 'void ' else 'return '}self->methods->{method}({names});"
            bodies.append(f"static {result}{name}_{method}({parameters})\n{{\n    {call}\n}}\n")
        methods[name] = [*(methods[base] if base else []), *fields]
        parts += [
            f"struct {name}_methods {{", *methods[name], "};",
            f'_Static_assert(sizeof(struct {name}_methods) == {slots} * sizeof(void *), "slots of {name}");',
            f"struct {name} {{\n    const struct {name}_methods *methods;\n}};",
            *bodies,
        ]  # fmt: skip
        octets = ", ".join(f"0x{octet:02x}" for octet in uuid.UUID(identifier).bytes_le)
        entries.append(f'    {{"{name}", {{{octets}}}}},')
    return "\n".join(
        [*parts, "static const struct {", "    const char *name;", "    unsigned char iid[16];",
         "} ndpy_interfaces[] = {",
         *entries, "};"]
    )  # fmt: skip


def source() -> str:
    table = read("networkdirect/interfaces.h") + read("networkdirect/version1/interfaces.h")
    # Keep only the types. The Windows headers declare the calls.
    win32_types = re.sub(r"^[\w ]+\*?\w+\([^;]*\);\n", "", read("networkdirect/win32.h"), flags=re.MULTILINE)
    return f"""
#define WIN32_LEAN_AND_MEAN
#include <winsock2.h>
#include <ws2tcpip.h>
#include <ws2spi.h>
#include <windows.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

{_METHOD.sub("", table)}
{thunks(table)}
{win32_types}
#include "ndpy_abi.h"
#include "networkdirect/shim.h"
#include "networkdirect/version1/shim.h"
#include "networkdirect/loader.c"
#include "networkdirect/requests.c"
#include "rings.c"
#include "networkdirect/common.c"
#include "networkdirect/data_path.c"
#include "networkdirect/version1/data_path.c"
"""


ffibuilder = FFI()
ffibuilder.cdef(run_path(str(HERE / "operations.py"))["declaration"]())
PARTS = (
    "ndpy_abi.h",
    "networkdirect/interfaces.h",
    "networkdirect/version1/interfaces.h",
    "networkdirect/win32.h",
    "networkdirect/shim.h",
    "networkdirect/version1/shim.h",
)
for part in PARTS:
    ffibuilder.cdef(read(part))
ffibuilder.set_source(
    "ndpy._networkdirect",
    source(),
    include_dirs=[str(HERE)],
    depends=[str(path) for path in sorted(HERE.glob("**/*.[ch]"))],
    libraries=["ws2_32", "kernel32"],
    py_limited_api=True,
    extra_compile_args=["/std:c11", "/experimental:c11atomics", "/O2"],
)

if __name__ == "__main__":
    # For a compiler that setuptools does not run. The argument is the path of the C file.
    ffibuilder.emit_c_code(sys.argv[1])
