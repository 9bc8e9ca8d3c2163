"""Fixtures for the tests that need Windows. Other systems collect none of these tests."""

import sys

if sys.platform != "win32":
    collect_ignore_glob = ["test_*.py"]
else:
    from pathlib import Path

    # An embedded Python does not add a test's folder to sys.path.
    sys.path.insert(0, str(Path(__file__).parent))

    from kit.helpers import STRESS
    from native_answers import native  # noqa: F401
    from own_softnd import softnd, version  # noqa: F401

    # These files run their tests with both versions.
    _BOTH = {"test_cancelling", "test_closing_in_flight", "test_overlapped", "test_pollers", "test_removal"}

    def pytest_generate_tests(metafunc):
        if "version" in metafunc.fixturenames and metafunc.module.__name__ in _BOTH:
            metafunc.parametrize("version", [2, 1] if STRESS else [2], ids=lambda number: f"version {number}")
