"""Builds the extension modules, those of cffi and _core, and softverbs, the software adapter for Linux.

Everything else about the package stands in pyproject.toml.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError

# A folder with what a cross-compiler made, and the platform that it is for: the wheel becomes that platform's, on
# whatever system it is built. rig/wheels.sh sets them.
CROSS_BUILT = os.environ.get("NDPY_CROSS_BUILT")
CROSS_PLATFORM = os.environ.get("NDPY_CROSS_PLATFORM", "")
TARGET = sys.platform if not CROSS_BUILT else "win32" if CROSS_PLATFORM.startswith("win") else "linux"

# A free-threaded Python has no limited API before 3.15, so what is built for it serves that version alone.
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))

CFFI_MODULES = {"linux": ["cdefs/build_verbs.py:ffibuilder"], "win32": ["cdefs/build_networkdirect.py:ffibuilder"]}
CORE = Extension(
    "ndpy._core",
    sorted(str(path) for path in Path("cdefs/core").glob("*.c")),
    depends=[*map(str, Path("cdefs/core").glob("*.h")), *map(str, Path("cdefs").glob("*.h"))],
    py_limited_api=not FREE_THREADED,
    extra_compile_args=["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden"]
    if sys.platform == "linux"
    else [],
    # It calls nothing of the C library, by which auditwheel knows whose wheel it is.
    extra_link_args=["-Wl,--no-as-needed,-lc"] if sys.platform == "linux" else [],
)
SOFTVERBS_FOLDER = "ndpy/platforms/verbs/soft"
SOFTVERBS = ("libsoftverbs.so", "libibverbs.so.1", "librdmacm.so.1", "libndpyfaults.so")
# (file, where it belongs in the package)
if CROSS_BUILT:
    BUILT_BEFORE = [
        (Path(CROSS_BUILT, name), folder)
        for name, folder in (
            [("_networkdirect.pyd", "ndpy"), ("_core.pyd", "ndpy"), ("softnd.dll", "ndpy/networkdirect")]
            if TARGET == "win32"
            else [
                ("_verbs.abi3.so", "ndpy"),
                ("_core.abi3.so", "ndpy"),
                *((name, SOFTVERBS_FOLDER) for name in SOFTVERBS),
            ]
        )
    ]
elif TARGET == "win32" and Path("softrdma/build/softnd.dll").exists():
    # softnd has a Makefile of its own; without it the package works with the providers of the machine.
    BUILT_BEFORE = [(Path("softrdma/build/softnd.dll"), "ndpy/networkdirect")]
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


class BuildSoftverbs(Command):
    """Builds softverbs' libraries by their own Makefile.
    For an editable installation they come into the source tree.
    """

    description = "build softverbs, the software adapter for Linux"
    user_options: ClassVar = [
        ("build-lib=", "d", "folder of the package's files"),
        ("inplace", "i", "build into the source tree"),
    ]
    boolean_options: ClassVar = ["inplace"]
    editable_mode = False

    def initialize_options(self) -> None:
        self.build_lib = None
        self.inplace = False

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def _is_inplace(self) -> bool:
        return bool(self.inplace or self.editable_mode)

    def run(self) -> None:
        try:
            # A warning of another compiler must not keep anybody from installing the package.
            lenient = [] if self._is_inplace() else ["WERROR="]
            subprocess.run(["make", "-s", "-C", "softrdma/verbs", *lenient], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise CompileError(f"softverbs cannot be built (needs make and a C compiler): {error}") from None
        target = SOFTVERBS_FOLDER if self._is_inplace() else os.path.join(self.build_lib, SOFTVERBS_FOLDER)
        self.mkpath(target)
        for name in SOFTVERBS:
            file, _ = self.copy_file(os.path.join("softrdma/build/lib", name), os.path.join(target, name))
            if not self._is_inplace() and shutil.which("strip"):
                self.spawn(["strip", "--strip-unneeded", file])

    def get_source_files(self) -> list[str]:
        return []  # MANIFEST.in names them

    def get_outputs(self) -> list[str]:
        return (
            [] if self._is_inplace() else [os.path.join(self.build_lib, SOFTVERBS_FOLDER, name) for name in SOFTVERBS]
        )

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class Build(build):
    sub_commands: ClassVar = [
        *build.sub_commands,
        ("build_softverbs", lambda self: TARGET == "linux" and not CROSS_BUILT),
    ]


class Abi3Wheel(bdist_wheel):
    """Tags the wheel for every CPython from 3.10 on: the modules use the limited API only, unless Python is
    free-threaded.
    """

    def finalize_options(self) -> None:
        if CROSS_BUILT:
            self.plat_name = CROSS_PLATFORM
        super().finalize_options()
        self.py_limited_api = False if FREE_THREADED else "cp310"


setup(
    ext_modules=[] if CROSS_BUILT else [CORE],
    cffi_modules=[] if CROSS_BUILT else CFFI_MODULES.get(sys.platform, []),
    distclass=Package,
    cmdclass={
        "bdist_wheel": Abi3Wheel,
        "build": Build,
        "build_py": BuildPackage,
        "build_softverbs": BuildSoftverbs,
    },
)
