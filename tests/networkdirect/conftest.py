"""These tests are of Windows; elsewhere nothing of them is collected."""

import sys

if sys.platform != "win32":
    collect_ignore_glob = ["test_*.py"]
