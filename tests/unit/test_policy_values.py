"""RetryPolicy refuses values that a queue pair cannot have."""

from __future__ import annotations

import math

import pytest

from ndpy import RetryPolicy


@pytest.mark.parametrize(
    ("field", "most"), [("retry_count", 7), ("rnr_retry_count", 7), ("min_rnr_timer", 31), ("ack_timeout", 31)]
)
def test_a_value_out_of_range_is_refused_with_the_range(field, most):
    for value in (-1, most + 1, 1.5, "7"):
        with pytest.raises(ValueError, match=f"{field} is 0 to {most} or None, not {value!r}"):
            RetryPolicy(**{field: value})
    assert [getattr(RetryPolicy(**{field: value}), field) for value in (None, 0, most)] == [None, 0, most]


def test_a_policy_cannot_be_changed_and_compares_by_value():
    policy = RetryPolicy(rnr_retry_count=RetryPolicy.ENDLESS)
    assert policy == RetryPolicy(None, 7)
    with pytest.raises(AttributeError):
        policy.retry_count = 1


@pytest.mark.parametrize(
    ("retry_count", "ack_timeout", "seconds"),
    [
        # 4.096 us times 2**14 is 67.1 ms.
        (7, 14, 8 * 0.067108864),
        (0, 1, 8.192e-6),
        (6, 19, 7 * 2.147483648),
        (3, 0, math.inf),
        (None, 14, None),
        (7, None, None),
        (None, 0, None),
    ],
)
def test_a_policy_says_when_a_silent_peer_is_given_up(retry_count, ack_timeout, seconds):
    said = RetryPolicy(retry_count=retry_count, ack_timeout=ack_timeout).gives_up_s
    assert said == (None if seconds is None else pytest.approx(seconds))
