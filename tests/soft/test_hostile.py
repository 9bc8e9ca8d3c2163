"""A peer that breaks every rule, against softverbs with AddressSanitizer. tests/softnd/attacks.py has the tests."""

from __future__ import annotations

import building
import hostile
import pytest
from attacks import *  # noqa: F403
from attacks import LIMIT_S, TARGET_IDS, TARGETS
from hostile import Program, Target

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module", params=TARGETS, ids=TARGET_IDS)
def target(tmp_path_factory, request):
    address, queue = request.param
    statistics = tmp_path_factory.mktemp("hostile") / "statistics"
    command = [building.program("hostile_target", "-asan"), address, hostile.SECRET.decode(), LIMIT_S, queue]
    with Program(command, building.environment(STATISTICS=statistics)) as process:
        target = Target(process, address)
        yield target
        target.end()
    building.check_statistics(statistics)
