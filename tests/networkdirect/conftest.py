"""These tests are of Windows; elsewhere nothing of them is collected."""

import sys

if sys.platform != "win32":
    collect_ignore_glob = ["test_*.py"]
else:
    from pathlib import Path

    # An embedded Python does not look beside a test.
    sys.path.insert(0, str(Path(__file__).parent))

    from own_softnd import softnd  # noqa: F401
