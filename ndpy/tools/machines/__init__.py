"""Software adapters: on this machine's kernel, or in a small VM if this kernel has no driver for them."""

from ndpy.errors import NdpyError


class SetupError(NdpyError):
    """The machine lacks something. The message says what, and how to get it."""

    problem = "setup"
