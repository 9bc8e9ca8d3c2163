"""RetryPolicy refuses values that a queue pair cannot have."""

from __future__ import annotations

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
