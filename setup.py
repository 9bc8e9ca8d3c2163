"""Builds the extension modules, those of cffi and _core; everything else about the package stands in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

# A folder with _networkdirect.pyd, _core.pyd and softnd.dll that a cross-compiler made: the wheel becomes Windows', on whatever
# system it is built. rig/wheels.sh sets it.
CROSS_BUILT = os.environ.get("NDPY_CROSS_BUILT")
TARGET = "win32" if CROSS_BUILT else sys.platform

CFFI_MODULES = {"linux": ["cdefs/build_verbs.py:ffibuilder"], "win32": ["cdefs/build_networkdirect.py:ffibuilder"]}
CORE = Extension(
    "ndpy._core",
    sorted(str(path) for path in Path("cdefs/core").glob("*.c")),
    depends=[*map(str, Path("cdefs/core").glob("*.h")), "cdefs/ndpy_abi.h"],
    py_limited_api=True,
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"]
    if sys.platform == "linux"
    else [],
    # It calls nothing of the C library, by which auditwheel knows whose wheel it is.
    extra_link_args=["-Wl,--no-as-needed,-lc"] if sys.platform == "linux" else [],
)
# (file, where it belongs in the package)
if CROSS_BUILT:
    BUILT_BEFORE = [
        (Path(CROSS_BUILT, "_networkdirect.pyd"), "ndpy"),
        (Path(CROSS_BUILT, "_core.pyd"), "ndpy"),
        (Path(CROSS_BUILT, "softnd.dll"), "ndpy/networkdirect"),
    ]
elif TARGET == "win32" and Path("softnd/build/softnd.dll").exists():
    # softnd has a Makefile of its own; without it the package works with the providers of the machine.
    BUILT_BEFORE = [(Path("softnd/build/softnd.dll"), "ndpy/networkdirect")]
else:
    BUILT_BEFORE = []


class Package(Distribution):
    """What a cross-compiler made is machine code too, so the wheel is for one platform."""

    def has_ext_modules(self) -> bool:
        return bool(CROSS_BUILT or super().has_ext_modules())


class BuildPackage(build_py):
    """Takes what was built before into the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, folder in BUILT_BEFORE:
                target = Path(self.build_lib, folder)
                self.mkpath(str(target))
                self.copy_file(str(source), str(target))


class Abi3Wheel(bdist_wheel):
    """Tags the wheel for every CPython from 3.10 on: the modules use the limited API only."""

    def finalize_options(self) -> None:
        if CROSS_BUILT:
            self.plat_name = "win_amd64"
        super().finalize_options()
        self.py_limited_api = "cp310"


setup(
    ext_modules=[] if CROSS_BUILT else [CORE],
    cffi_modules=[] if CROSS_BUILT else CFFI_MODULES.get(sys.platform, []),
    distclass=Package,
    cmdclass={"bdist_wheel": Abi3Wheel, "build_py": BuildPackage},
)
