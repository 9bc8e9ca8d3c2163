"""Capabilities. A misspelt one is an error and never counts as absent."""

from __future__ import annotations

import pytest

from ndpy import Capability

SOME = Capability.MEMORY_WINDOWS | Capability.INLINE


def test_a_misspelt_capability_is_an_error():
    with pytest.raises(AttributeError):
        Capability.MEMORY_WINDOW  # noqa: B018
    with pytest.raises(TypeError):
        "MEMORY_WINDOWS" in SOME  # noqa: B015


def test_they_are_asked_for_with_in():
    assert Capability.INLINE in SOME
    assert Capability.ATOMICS not in SOME
    assert SOME in SOME | Capability.ATOMICS
    assert SOME not in Capability.INLINE


def test_their_names_are_listed_in_alphabetical_order():
    assert SOME.names() == ["INLINE", "MEMORY_WINDOWS"]
    assert Capability.NONE.names() == []
