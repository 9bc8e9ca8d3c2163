"""Fixtures of the contract's tests."""

from kit.aio_ends import connected as connected
from kit.aio_ends import run as run
from kit.aio_ends import windows as windows
