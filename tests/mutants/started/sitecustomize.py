"""Read by every Python program that a test of a mutation run starts, by PYTHONPATH."""

import os
import sys
from pathlib import Path

if "MUTANT_OF_NDPY" in os.environ:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import hook

    hook.activate(os.environ["MUTANT_OF_NDPY"])
