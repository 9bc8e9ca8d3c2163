"""What users can name is what tests/unit/public_names.txt says, so that every change of the interface shows in a
diff.
"""

from __future__ import annotations

import difflib
import importlib
import sys

import public_names

CLASSES = {
    f"{module}.{name}": thing
    for module in public_names.MODULES
    for name in public_names.exported(importlib.import_module(module))
    if isinstance(thing := getattr(sys.modules[module], name), type)
}


def test_the_interface_is_the_listed_one():
    listed = public_names.LIST.read_text(encoding="utf-8").splitlines()
    changes = list(difflib.unified_diff(listed, public_names.lines(), "the list", "the code", lineterm="", n=0))
    assert changes == [], "if you meant this, run tests/unit/public_names.py --write"


def test_the_list_has_every_attribute_that_a_class_has():
    """The list is made from the source, which may have a form that its reader overlooks."""
    missing = {name: attributes(cls) - set(public_names.members(cls)) for name, cls in CLASSES.items()}
    assert {name: found for name, found in missing.items() if found} == {}


def attributes(cls: type) -> set[str]:
    own = [vars(each) for each in cls.__mro__ if each.__module__.split(".")[0] == "ndpy"]
    return {name for each in own for name in each if not name.startswith("_")} - set(getattr(cls, "__members__", ()))
