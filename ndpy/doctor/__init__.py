"""What is right and wrong with RDMA on this machine."""

from __future__ import annotations

import sys

from ndpy.doctor.findings import Finding, failed, split_remedy
from ndpy.errors import ProviderNotFoundError

_INSTALL_AGAIN = "install ndpy again with pip"


def diagnose() -> list[Finding]:
    """Examine this machine. Never raises for anything that is broken."""
    try:
        if sys.platform == "linux":
            from ndpy.doctor import linux

            return linux.diagnose()
        if sys.platform == "win32":
            from ndpy.doctor import windows

            return windows.diagnose()
    except ImportError as error:
        return [failed("ndpy", f"a module of ndpy or of what it needs is missing: {error}", _INSTALL_AGAIN)]
    except ProviderNotFoundError as error:
        return [failed("ndpy", *split_remedy(str(error), _INSTALL_AGAIN))]
    return [failed("ndpy", f"ndpy has no provider for {sys.platform}", "use Linux or Windows")]
