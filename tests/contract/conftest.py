"""Fixtures of the contract's tests."""

from aio_ends import run as run
