"""Which switch each network interface of this machine is connected to. The daemon lldpd knows it, if it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

_LIMIT_S = 10.0
_MOST_INTERFACES = 256
_LONGEST_NAME = 64
_PROGRAM = "lldpctl"


class LldpError(Exception):
    """It cannot be told. The message says why."""


def ask() -> dict[str, str]:
    """The switch at each interface, by the interface's name.

    Raises:
        LldpError: lldpctl is missing, fails, takes longer than 10 s, or prints something else.
    """
    # A scheduler may start programs without the folders of system programs.
    program = shutil.which(_PROGRAM, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"]))
    if program is None:
        raise LldpError(
            f"there is no {_PROGRAM} that this user may run; install lldpd, and add the user to the program's group"
        )
    command = [program, "-f", "json"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_LIMIT_S, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        raise LldpError(f"{_PROGRAM} did not end within {_LIMIT_S:g} s") from None
    except OSError as error:
        raise LldpError(f"{program} cannot be started: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise LldpError(f"{_PROGRAM}: {said}; does lldpd run, and may this user ask it?")
    return switches(done.stdout)


def switches(answer: str) -> dict[str, str]:
    """The same from what `lldpctl -f json` printed. An interface that hears several switches is left out.

    Raises:
        LldpError: the text cannot be understood.
    """
    found: dict[str, set[str]] = {}
    try:
        for interface, switch in _neighbours(json.loads(answer)):
            found.setdefault(interface, set()).add(switch)
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise LldpError(f"what {_PROGRAM} printed cannot be understood: {error!r:.120}") from None
    known = {interface: min(names) for interface, names in found.items() if len(names) == 1}
    return dict(list(known.items())[:_MOST_INTERFACES])


def _neighbours(document: Any) -> Iterator[tuple[str, str]]:
    """(interface, name of the switch)."""
    for each in _listed(document["lldp"].get("interface", {})):
        for interface, facts in each.items():
            chassis = facts.get("chassis", {})
            # A switch without a name stands there with its facts alone, without a name around them.
            named = {chassis["id"]["value"]: chassis} if isinstance(chassis.get("id"), dict) else chassis
            for name, told in named.items():
                if _is_switch(told):
                    yield str(interface)[:_LONGEST_NAME], re.sub(r"\s+", "_", str(name))[:_LONGEST_NAME]


def _is_switch(told: Any) -> bool:
    """A host at the other end of a cable announces itself too. Without capabilities, it counts as a switch."""
    capabilities = _listed(told.get("capability", []))
    return not capabilities or any(each["enabled"] and each["type"] in ("Bridge", "Router") for each in capabilities)


def _listed(found: Any) -> list[Any]:
    """lldpctl prints a single thing as itself, and several as a list of them."""
    return found if isinstance(found, list) else [found]
