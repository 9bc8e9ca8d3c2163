"""`ndpy soft`: programs on soft0, the software adapter of this package."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path

import click

import ndpy
from ndpy.platforms.verbs import softverbs

# As a shell: the command cannot be run, or is not there.
_NOT_RUN = 126
_NOT_FOUND = 127
# As `ndpy vm run`: no adapter could be provided.
_NO_ADAPTER = 125


@click.group(short_help="Run programs on the software adapter of this package, on Linux.")
def command() -> None:
    """Use soft0, the software RDMA adapter of this package, on any Linux machine.

    soft0 needs no RDMA hardware, no module of the kernel and no root. It speaks iWARP over TCP, with the addresses of
    this machine. ndpy takes it where NDPY_ADAPTER=soft0 or ndpy.open_adapter("soft0") names it. `ndpy soft run` is for
    all other programs that use libibverbs and librdmacm.
    """


def _folder() -> Path:
    """The folder of the libraries. Exits if there is none."""
    if sys.platform != "linux":
        click.echo(f"ndpy soft: softverbs is for Linux, and this is {sys.platform}", err=True)
        sys.exit(_NO_ADAPTER)
    try:
        return softverbs.folder()
    except ndpy.NdpyError as error:
        click.echo(f"ndpy soft: {error}", err=True)
        sys.exit(_NO_ADAPTER)


@command.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, metavar="[--] COMMAND...")
def run(words: tuple[str, ...]) -> None:
    """Run COMMAND with soft0 as its only adapter.

    COMMAND can be any program that uses libibverbs and librdmacm. In the environment:

    \b
      LD_LIBRARY_PATH  begins with the folder of softverbs' libraries
      NDPY_LIBIBVERBS  softverbs, for programs with ndpy
      NDPY_LIBRDMACM   the same
      NDPY_ADAPTER     soft0, unless it is set

    A program that ignores LD_LIBRARY_PATH, such as one with the set-user-ID bit, does not get soft0.

    COMMAND takes the place of this process. So signals reach it, and the exit status is its own. It is one of these if
    COMMAND did not run:

    \b
      125  softverbs is not there.
      126  COMMAND cannot be executed.
      127  There is no such COMMAND.
    """
    folder = _folder()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        # Python ignores them, and the command would inherit that.
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvpe(words[0], list(words), softverbs.environment(folder, os.environ))
    except (OSError, ValueError) as error:
        sys.exit(why_not_run("ndpy soft", words[0], error))


def why_not_run(command: str, program: str, error: OSError | ValueError) -> int:
    """Say why a program did not start. Returns the exit status."""
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    click.echo(f"{command}: {program} cannot be run: {reason}", err=True)
    absent = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
    return _NOT_FOUND if absent else _NOT_RUN


@command.command()
def path() -> None:
    """Print the folder of softverbs' libraries, for LD_LIBRARY_PATH."""
    click.echo(_folder())
