"""All loggers are made in one place, say what the documentation says, and are silent until the program wants them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ndpy.vocabulary.loggers import LOGGERS, logger

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "ndpy/vocabulary/loggers.py"
SOURCES = [*sorted((ROOT / "ndpy").rglob("*.py")), ROOT / "pytest_ndpy.py"]
PAGE = ROOT / "docs/howto/logging.md"

#: The modules that say something, with the logger. Those that every request or completion runs through are not among
#: them.
SAID_BY = {
    "ndpy/aio/life.py": "ndpy.aio",
    "ndpy/aio/server.py": "ndpy.aio",
    "ndpy/cache/registration_cache.py": "ndpy.cache",
    "ndpy/objects/adapter.py": "ndpy.adapters",
    "ndpy/objects/connection_life.py": "ndpy.connections",
    "ndpy/objects/listener.py": "ndpy.connections",
    "ndpy/objects/queue_pair_connection.py": "ndpy.connections",
    "ndpy/platforms/networkdirect/provider_dll.py": "ndpy.adapters",
    "ndpy/platforms/networkdirect/version1/connection.py": "ndpy.connections",
    "ndpy/platforms/verbs/native_calls.py": "ndpy.adapters",
}


def calls(path: Path, name: str) -> list[ast.Call]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name
    ]


def test_only_one_module_makes_loggers():
    assert [path for path in SOURCES if calls(path, "getLogger")] == [HERE]


def test_each_module_says_what_its_logger_is_for():
    found = {
        path.relative_to(ROOT).as_posix(): ast.literal_eval(call.args[0])
        for path in SOURCES
        for call in calls(path, "logger")
    }
    assert found == SAID_BY
    assert set(SAID_BY.values()) == set(LOGGERS)


def test_an_unknown_logger_is_refused():
    with pytest.raises(ValueError, match=r"no logger 'ndpy\.cach'; LOGGERS has ndpy\.adapters, "):
        logger("ndpy.cach")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)


def test_a_program_that_does_not_configure_logging_sees_nothing():
    code = "import logging, ndpy.vocabulary.loggers; logging.getLogger('ndpy.aio').warning('a client was refused')"
    assert run(code).stderr == ""
    wanted = run(f"import logging; logging.basicConfig(); {code}")
    assert wanted.stderr == "WARNING:ndpy.aio:a client was refused\n"


def test_the_page_has_the_table_of_the_loggers():
    rows = re.findall(r"^\| `(ndpy\.\w+)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [(name, says.replace("`", "")) for name, says in rows] == list(LOGGERS.items())
