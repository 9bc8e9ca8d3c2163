"""Threads that connect, post and destroy at the same time, under sanitizers. programs/churn.c says what they do."""

from __future__ import annotations

import building
import pytest
from kit.helpers import SEED, rounds

THREADS = 5
# ThreadSanitizer is slow, and what it looks for does not depend on how much is done.
ROUNDS = {"-asan": rounds(3000, 200), "-tsan": rounds(1500, 100)}

pytestmark = pytest.mark.timeout(rounds(1300, 200))


@pytest.mark.parametrize("sanitizer", ROUNDS, ids=["address and undefined", "thread"])
@pytest.mark.parametrize("way", ["manager", "number"])
def test_objects_can_be_destroyed_while_the_library_uses_them(sanitizer, way, tmp_path):
    churn = building.program("churn", sanitizer)
    statistics = tmp_path / "statistics"
    building.run(
        churn, THREADS, ROUNDS[sanitizer], SEED % 1000, way, timeout_s=rounds(1200, 150), STATISTICS=statistics
    )
    building.check_statistics(statistics)


def test_the_library_can_begin_again_and_again():
    """One thread: each round opens the only adapter, so that the workers of one round end before those of the next."""
    building.run(
        building.program("churn", "-tsan"), 1, rounds(600, 60), SEED % 1000, "number", timeout_s=rounds(600, 120)
    )
