"""F.5.4, many times: a Send that was taken succeeds, whoever leaves first and however soon."""

from __future__ import annotations

import pytest
from conftest import share
from endings import CONVERSATIONS, converse

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("active", [0, 1], ids=["first role connects", "second role connects"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_f_5_4_version_2(name, active):
    failures = converse(name, active, (2, 2), share(1000, 25))
    assert not failures, (len(failures), failures[:5])
