"""Private data: which objects are taken, in every call that has any."""

from __future__ import annotations

import array

import pytest

import ndpy
from ndpy.objects.connection_parameters import check_private_data


@pytest.mark.parametrize(
    "data", [b"ab", bytearray(b"ab"), memoryview(b"ab"), memoryview(b"axb")[::2], array.array("B", b"ab")]
)
def test_a_buffer_is_taken(data):
    assert check_private_data(data, 2, "connect") == b"ab"


@pytest.mark.parametrize("data", [0, 5, True, None, 3.5, [], [1, 2, 3], (1, 2), {1}, object(), "", "hello"])
def test_what_is_not_a_buffer_is_a_type_error(data):
    name = type(data).__name__
    with pytest.raises(TypeError, match=f"^accept: private_data is bytes or another buffer, not {name}"):
        check_private_data(data, 100, "accept")


def test_text_gets_the_remedy():
    with pytest.raises(TypeError, match="encode"):
        check_private_data("hello", 100, "accept")


def test_a_view_that_was_given_stays_usable():
    view = memoryview(b"ab")
    check_private_data(view, 2, "connect")
    assert view[0] == ord("a")


def test_more_than_the_adapter_takes_is_refused():
    with pytest.raises(ndpy.LimitExceededError, match=r"3 bytes of private data are more than 2"):
        check_private_data(b"abc", 2, "reject")
