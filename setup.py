"""Builds the cffi extension modules; everything else about the package stands in pyproject.toml."""

import sys

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class Abi3Wheel(bdist_wheel):
    """Tags the wheel for every CPython from 3.10 on: the modules use the limited API only."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.py_limited_api = "cp310"


setup(
    cffi_modules=["cdefs/build_verbs.py:ffibuilder"] if sys.platform == "linux" else [],
    cmdclass={"bdist_wheel": Abi3Wheel},
)
