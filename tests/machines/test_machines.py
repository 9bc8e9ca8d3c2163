"""What ndpy finds on the machines of this folder, and which of their adapters and addresses it takes. README.md has the
rules.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.deadlines import patient

if sys.platform != "linux":
    pytest.skip("the machines are examined on Linux", allow_module_level=True)

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.machine"))
WINDOWS = sorted(path.stem for path in FOLDER.glob("*.windows"))
_CANNOT = 77
# Machines that are recorded too, with different kinds of names, addresses and devices.
RECORDED = [
    *(
        "azure_mana",
        "bond",
        "chelsio_iwarp",
        "gpu_host",
        "gpu_out_of_reach",
        "ipv6_only",
        "limited_group",
        "pod_one_of_eight",
    ),
    *("user_without_rights", "vlans"),
]
_PRIVATE = "names_of_their_own"


def examined(*command: str) -> dict[str, dict[str, str]]:
    """What a program of this folder finds on each machine. One process examines them all."""
    done = subprocess.run(
        [sys.executable, FOLDER / command[0], *command[1:]],
        capture_output=True,
        text=True,
        timeout=patient(120),
        cwd=FOLDER.parent.parent,
    )
    if done.returncode == _CANNOT:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found():
    return examined("examine.py", "--record", *RECORDED, _PRIVATE)


@pytest.fixture(scope="module")
def found_on_windows():
    return examined("windows.py")


def expected(name: str) -> list[str]:
    return (FOLDER / f"{name}.expected").read_text(encoding="utf-8").splitlines()


def test_every_machine_has_its_expectations():
    assert sorted(path.stem for path in FOLDER.glob("*.expected")) == sorted([*NAMES, *WINDOWS])


@pytest.mark.parametrize("name", NAMES)
def test_what_is_found_on(found, name):
    """If a difference is right, `python tests/machines/examine.py --write` writes the expectations, and git shows
    it.
    """
    assert found[name]["found"].splitlines() == expected(name)


@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_found_with_windows_on(found_on_windows, name):
    """Here it is windows.py that writes the expectations."""
    assert found_on_windows[name]["found"].splitlines() == expected(name)


# An IP address, a MAC address or a GUID, perhaps with a scope, an address on InfiniBand, and the path of a control
# group.
_ADDRESS = re.compile(
    r"(?<![\w.])(?:\d+(?:\.\d+){3}|[0-9a-f]*:[0-9a-f:]*:[0-9a-f:.]*)(?:%[\w.]+)?|LID [1-9]\d*|/sys/fs/cgroup/[\w/.-]+/"
)


def without_addresses(text: str) -> list[str]:
    """The rows in any order, because names of interfaces may sort otherwise. A record has no destinations."""
    return sorted(_ADDRESS.sub("ADDRESS", line) for line in text.splitlines() if not re.match(r"\S+ to ", line))


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_machine_is_like_the_original(found, name):
    assert without_addresses(found[name]["again"]) == without_addresses(found[name]["found"])


def test_a_record_does_not_tell_whose_machine_it_is(found):
    recorded = found[_PRIVATE]["recorded"]
    # Words, and groups of digits of addresses and GUIDs.
    secret = [
        "acme",
        "jane",
        "lab",
        "7788",
        "abcdef",
        "131.107",
        "5.77",
        "2620",
        "1ec",
        "8f8",
        "4b03",
        "506b",
        "526b",
        "4bc0",
        "c0ff",
        "ffee",
    ]
    secret += ["c0:ff", "00:1b:21", "ab:cd", "172.20.30", "30.40", "9e21", "21a7", "a92c", "2323"]
    assert [word for word in secret if word in recorded.lower()] == []
    assert len(without_addresses(found[_PRIVATE]["again"])) == len(without_addresses(found[_PRIVATE]["found"]))
