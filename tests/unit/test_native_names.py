"""Every native function and constant that ndpy uses is declared, even those of the system that this is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECLARED_FOR = {
    "verbs": ("ndpy_abi.h", "verbs/ibverbs.h", "verbs/rdmacm.h", "verbs/shim.h"),
    "networkdirect": (
        "ndpy_abi.h",
        "networkdirect/interfaces.h",
        "networkdirect/version1/interfaces.h",
        "networkdirect/win32.h",
        "networkdirect/shim.h",
        "networkdirect/version1/shim.h",
    ),
}
# Names that the public classes use must be declared for every platform.
USES = [
    (platform, path)
    for platform in DECLARED_FOR
    for path in sorted([*(ROOT / "ndpy" / platform).rglob("*.py"), *(ROOT / "ndpy").glob("*.py")])
]


def declared(platform: str) -> set[str]:
    text = "\n".join((ROOT / "cdefs" / name).read_text() for name in DECLARED_FOR[platform])
    return set(re.findall(r"\w+", re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)))


def used(source: str) -> set[str]:
    """The names in `lib.name` and `self._lib.name`."""
    return {
        node.attr
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and ast.unparse(node.value) in ("lib", "self._lib")
        and not node.attr.startswith("__")
    }


@pytest.mark.parametrize(("platform", "path"), USES, ids=lambda part: str(part).removeprefix(f"{ROOT}/"))
def test_what_a_module_uses_of_the_extension_module_is_declared(platform, path):
    assert used(path.read_text()) <= declared(platform)


def test_the_check_sees_the_names():
    assert used("a = lib.first()\nb = staticmethod(self._lib.second)\nc = other.third\n") == {"first", "second"}
    assert {"ibv_create_qp", "ndpy_post_one"} <= declared("verbs")
    assert {"IND2QueuePair_Flush", "ndpy_post_one", "version1_post"} <= declared("networkdirect")
