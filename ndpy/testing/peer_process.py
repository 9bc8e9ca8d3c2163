"""The process in which the function of a peer runs. `peers.py` starts it."""

from __future__ import annotations

import faulthandler
import importlib.util
import pickle
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ndpy
from ndpy.testing.peers import Channel
from ndpy.tools.cli.channel import connect_with_secret


def _main(port: str) -> None:
    """Run the function that the test has named on standard input. Exits with 1 if it raises."""
    faulthandler.enable()
    channel = connect_with_secret(int(port), sys.stdin.buffer)
    channel.settimeout(None)
    connection = Connection(channel.detach())
    sys.path[:], name, file, function, adapter_name = pickle.load(sys.stdin.buffer)
    try:
        module = _load(name, Path(file))
        arguments = connection.recv()
        call = module
        for part in function.split("."):
            call = getattr(call, part)
        with ndpy.open_adapter(adapter_name) as adapter:
            connection.send(("begun", None))
            value = call(adapter, Channel(connection), *arguments)
        connection.send(("returned", value))
    except BaseException:
        text = traceback.format_exc()
        print(text, file=sys.stderr, flush=True)
        connection.send(("failed", text))
        sys.exit(1)


def _load(name: str, file: Path) -> Any:
    """The module of the test, which need not be found by its name."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    _main(sys.argv[1])
