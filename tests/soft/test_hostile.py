"""A peer that breaks every rule, against softverbs with AddressSanitizer. tests/softnd/attacks.py has the tests."""

from __future__ import annotations

import building
import hostile
import pytest
from attacks import (  # noqa: F401
    LIMIT_S,
    TARGET_IDS,
    TARGETS,
    neighbour,
    test_connections_that_say_nothing_leave_room_for_others,
    test_mutated_streams_reach_nothing_leave_nothing_and_disturb_nobody,
    test_private_data_of_512_bytes_are_taken,
    test_start_up_that_is_none_is_closed,
    test_tokens_of_a_connection_that_has_ended_are_refused,
    test_what_is_not_allowed_ends_this_connection_and_no_other,
    test_window_of_another_connection_is_refused,
    test_wrong_crc_is_refused,
)
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
