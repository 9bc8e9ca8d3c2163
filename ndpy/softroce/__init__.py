"""Software adapters: links on this kernel, and a small VM for machines whose kernel has none."""

from ndpy.errors import NdpyError


class SetupError(NdpyError):
    """The machine lacks something; the text says what, and how to get it."""
