"""What softverbs refuses itself. ndpy refuses most of it before it posts, so these are C programs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from kit.deadlines import patient
from kit.programs import built

from ndpy.platforms.verbs import softverbs
from ndpy.platforms.verbs.softverbs import environment


def test_memory_serves_neither_another_domain_nor_another_queue_pair_nor_a_key_of_the_other_kind():
    if not softverbs.is_there():
        pytest.skip("softverbs is not built")
    program = built(Path(__file__).with_name("programs") / "refusals.c", "-lrdmacm")
    variables = environment(softverbs.folder(), os.environ)
    done = subprocess.run([program], env=variables, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stdout + done.stderr
