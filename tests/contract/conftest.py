"""Fixtures of the contract's tests."""

import sys

from kit.aio_ends import connected as connected
from kit.aio_ends import run as run
from kit.aio_ends import windows as windows

if sys.platform == "linux":
    from kit.fake_cuda import cuda, fake_cuda_path, takes_cuda_memory, unmappable  # noqa: F401
