"""How softverbs finds out who has the other end of a connection within this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import building
import pytest
from kit.compiling import compiled
from kit.deadlines import patient

# Of IPv4 and then of IPv6: root's socket, another user's, one of root's that was closed, one that waits to be accepted.
# Then another host.
TRUSTED = {"kernel": "1 0 0 0 1 0 0 0 1", "table": "1 0 0 0 1 0 0 0 1", "nothing": "0 0 0 0 0 0 0 0 1"}


@pytest.fixture(scope="module")
def owners(tmp_path_factory):
    if os.geteuid():
        pytest.skip("this needs root, to become another user (CAP_SETUID)")
    softrdma = building.ROOT / "softrdma"
    source = Path(__file__).with_name("programs") / "owners.c"
    folders = [f"-I{softrdma / folder}" for folder in ("engine", "system/linux")]
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Werror", *folders]
    sources = (source, softrdma / "engine/address.c")
    program = compiled(tmp_path_factory.mktemp("owners") / "owners", *flags, *sources, "-lpthread")

    def trusted(way):
        done = subprocess.run([program, way], capture_output=True, text=True, timeout=patient(30))
        return done.stdout.strip()

    return trusted


@pytest.mark.parametrize("way", TRUSTED)
def test_the_kernel_or_its_table_names_the_owner_of_a_peer(owners, way):
    assert owners(way) == TRUSTED[way]


def test_users_who_have_no_number_in_a_user_namespace_are_not_taken_for_one(owners):
    trusted = owners("namespaces")
    if "-" in trusted:
        pytest.skip("this system allows no user namespaces")
    # Without numbers, and with theirs, its own user is one of them.
    assert trusted == "0 0 1 0 0 0"
