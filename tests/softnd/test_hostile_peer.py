"""A peer that breaks every rule, against softnd under Wine. attacks.py has the tests."""

from __future__ import annotations

import re

import hostile
import pytest
from attacks import *  # noqa: F403
from attacks import LIMIT_S, TARGET_IDS, TARGETS
from hostile import Target, WindowsProcess

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


@pytest.fixture(scope="module", params=TARGETS, ids=TARGET_IDS)
def target(tmp_path_factory, request):
    address, queue = request.param
    program = hostile.windows_program("hostile_target")
    statistics = tmp_path_factory.mktemp("hostile") / "statistics"
    arguments = (hostile.dll(), address, hostile.SECRET.decode(), LIMIT_S, queue)
    with WindowsProcess(program, *arguments, limit_s=LIMIT_S, SOFTND_STATISTICS=str(statistics)) as process:
        target = Target(process, address)
        yield target
        target.end()
    text = statistics.read_text()
    leaks = re.findall(r"(\d+) leaked", text)
    assert leaks and not any(map(int, leaks)), text
