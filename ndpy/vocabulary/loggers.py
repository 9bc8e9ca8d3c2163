"""The loggers of ndpy. Each module that logs takes its logger from here.

They are silent until the program configures logging. No request and no completion logs anything, so the data path does
not know of them.
"""

from __future__ import annotations

import logging

# Without a handler, Python would print warnings to the standard error.
logging.getLogger("ndpy").addHandler(logging.NullHandler())

#: The name of each logger, and what it says.
LOGGERS = {
    "ndpy.adapters": (
        "which RDMA libraries and providers were loaded; adapters that open, close or go away; their events"
    ),
    "ndpy.connections": (
        "each change of a connector's state, and why; the address of a name that is tried next; listeners, and the "
        "requests that they refuse; requests that failed, except cancelled ones; connections that are made from "
        "endpoints"
    ),
    "ndpy.cache": (
        "each registration of a cache, the ranges that a registration takes in, evictions, invalidations, and "
        "registrations that were tried again"
    ),
    "ndpy.aio": "clients that a server refused or lost, and the next address of a name; the state of each connection",
}


def logger(name: str) -> logging.Logger:
    """The logger of this name, which LOGGERS describes."""
    if name not in LOGGERS:
        raise ValueError(f"no logger {name!r}; LOGGERS has {', '.join(LOGGERS)}")
    return logging.getLogger(name)
