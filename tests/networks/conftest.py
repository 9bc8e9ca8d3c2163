"""A network of hosts in network namespaces. It goes with the test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

if sys.platform == "linux":
    from networks.namespaces import Network, why_impossible

    @pytest.fixture
    def network() -> Iterator[Network]:
        if os.geteuid():
            pytest.skip("making network namespaces needs root")
        if why := why_impossible():
            pytest.skip(f"this machine makes no network namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN, veth): {why}")
        with Network() as made:
            yield made
