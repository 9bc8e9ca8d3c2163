"""Python imports this in every program that a test of a mutation run starts, because PYTHONPATH names the folder."""

import os
import sys
from pathlib import Path

if "MUTANT_OF_NDPY" in os.environ:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import hook

    hook.activate(os.environ["MUTANT_OF_NDPY"])
