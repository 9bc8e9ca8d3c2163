"""What verbs programs find in soft0, which is not a matter of ndpy. Each test runs a C program of programs/."""

from __future__ import annotations

from c_programs import run


def test_a_message_without_a_receive_waits_as_long_as_rnr_retry_says():
    run("patience")
