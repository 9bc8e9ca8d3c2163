"""Importing this skips the tests of a file on other systems."""

import sys

import pytest

if sys.platform != "linux":
    pytest.skip("what these tests use is Linux's", allow_module_level=True)
