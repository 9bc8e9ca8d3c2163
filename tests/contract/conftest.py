"""Fixtures of the contract's tests."""

from aio_ends import run as run
from aio_ends import windows as windows
