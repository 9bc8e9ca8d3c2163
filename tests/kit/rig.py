"""The folder of the rig. Importing this skips the tests of a file where there is none, as with a wheel."""

from pathlib import Path

import pytest

RIG = Path(__file__).resolve().parents[2] / "rig"
if not RIG.is_dir():
    pytest.skip("the tests of a wheel have no rig", allow_module_level=True)
