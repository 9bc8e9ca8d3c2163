"""The built extension module has every declared name and type, and is not linked with an RDMA library."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from kit import linux_only as linux_only
from kit.helpers import HAS_GIL
from ndpy._verbs import ffi, lib

from ndpy import _verbs

ROOT = Path(__file__).resolve().parent.parent.parent
CDEFS = ROOT / "cdefs"
PACKAGE = ROOT / "ndpy"
OPAQUE = {"struct sockaddr", "struct ibv_async_event", "struct rdma_cm_event", "struct _compat_ibv_port_attr"}


def declarations() -> str:
    """The text of all declarations that cffi reads, without comments."""
    names = ("ndpy_abi.h", "verbs/ibverbs.h", "verbs/rdmacm.h", "verbs/shim.h")
    text = "\n".join((CDEFS / name).read_text() for name in names)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def declared_types() -> set[str]:
    return {" ".join(found) for found in re.findall(r"\b(struct|union|enum)\s+(\w+)\s*\{", declarations())}


def declared_functions() -> set[str]:
    return set(re.findall(r"^[\w *]*?\b(\w+)\([^;{]*\);", declarations(), flags=re.MULTILINE))


def test_every_declared_name_can_be_reached():
    """cffi notices a wrong declaration only when its name is first used."""
    names = dir(lib)
    for name in names:
        thing = getattr(lib, name)
        assert isinstance(thing, int) or callable(thing), name
    assert len(names) > 150
    assert declared_functions() <= set(names)
    assert {"ibv_create_qp", "rdma_create_id", "ndpy_post", "ndpy_poll", "IBV_WC_SUCCESS"} <= set(names)


@pytest.mark.parametrize("platform", ["verbs", "networkdirect"])
def test_every_name_that_python_uses_is_declared(platform):
    """Python finds a name that is not there only when it uses it, and the other system's module cannot be loaded
    here.
    """
    headers = [CDEFS / "ndpy_abi.h", *(CDEFS / platform).rglob("*.h")]
    text = re.sub(r"/\*.*?\*/", "", "\n".join(header.read_text() for header in headers), flags=re.DOTALL)
    modules = [
        path
        for folder in ("vocabulary", "objects", f"platforms/{platform}")
        for path in (PACKAGE / folder).rglob("*.py")
    ]
    used = {name for module in modules for name in re.findall(r"\b_?lib\.(\w+)", module.read_text())}
    assert len(used) > 50
    assert used - set(re.findall(r"\w+", text)) == set()


def test_every_declared_type_has_a_size():
    typedefs, structs, unions = ffi.list_types()
    kinds = [*(f"struct {name}" for name in structs), *(f"union {name}" for name in unions), *typedefs]
    kinds = [name for name in kinds if not name.startswith(("struct $", "union $", "$"))]
    # Types that only the C side knows are opaque. So are types that are only used behind pointers.
    sized = {name for name in kinds if ffi.typeof(name).kind != "primitive" and has_size(name)}
    enums = {name for name in declared_types() if name.startswith("enum")}
    for name in enums:
        assert ffi.sizeof(name) == 4, name
    structures = {name for name in declared_types() if not name.startswith("enum")}
    assert structures <= sized, structures - sized
    for name in structures:
        assert ffi.sizeof(name) > 0, name
        for field, description in ffi.typeof(name).fields or []:
            assert description.offset + ffi.sizeof(description.type) <= ffi.sizeof(name), (name, field)
    assert OPAQUE.isdisjoint(structures)


def has_size(name: str) -> bool:
    try:
        return ffi.sizeof(name) > 0
    except (ffi.error, ValueError):
        return False


def test_the_shared_structures_have_the_layout_that_python_unpacks():
    offsets = {name: field.offset for name, field in ffi.typeof("struct ndpy_element").fields}
    assert (ffi.sizeof("struct ndpy_element"), offsets) == (24, {"address": 0, "token": 8, "length": 16})
    assert ffi.sizeof("struct ndpy_completion") == 48
    offsets = {name: field.offset for name, field in ffi.typeof("struct ndpy_completion").fields}
    assert offsets == {
        "context": 0,
        "nbytes": 8,
        "operation": 16,
        "status": 20,
        "native_status": 24,
        "vendor_status": 28,
        "queue_pair": 32,
        "retired": 36,
        "slot": 40,
        "flags": 44,
    }


@pytest.mark.parametrize("command", [["ldd"], ["readelf", "-d"]], ids=lambda command: command[0])
def test_no_rdma_library_is_linked(command):
    try:
        shown = subprocess.run([*command, _verbs.__file__], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip(f"{command[0]} is not installed")
    assert shown.returncode == 0, shown.stderr
    assert "libc" in shown.stdout
    for library in ("ibverbs", "rdmacm", "libnl", "mlx"):
        assert library not in shown.stdout


@pytest.mark.skipif(not HAS_GIL, reason="without the GIL there is a module for each Python")
def test_the_module_is_for_every_python_from_3_10_on():
    assert _verbs.__file__.endswith(".abi3.so")
