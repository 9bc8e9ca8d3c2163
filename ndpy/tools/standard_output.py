"""What a command does when standard output cannot be written: a full disk, a quota, a reader who has closed the
pipe.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import Any

import click


class OutputError(Exception):
    """Standard output cannot be written.

    Not an OSError, so that no command takes it for a failure of its adapter or its peer.
    """

    def __init__(self, error: OSError) -> None:
        name = errno.errorcode.get(error.errno or 0, "no name")
        super().__init__(
            f"standard output cannot be written: {error.strerror} (errno {error.errno}, {name}). "
            "Make room there, or send it to another place"
        )
        #: The reader of the pipe has closed it.
        self.is_closed_pipe = error.errno == errno.EPIPE


class _Output(io.FileIO):
    """A file of standard output, which writes everything or raises OutputError."""

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            try:
                written = super().write(view[done:])
            except OSError as error:
                raise OutputError(error) from error
            if written is None:
                # Another program made it non-blocking.
                select.select([], [self], [])
            else:
                done += written
        return done


@contextlib.contextmanager
def checked_output(command: str) -> Iterator[None]:
    """In the block, the command ends with a sentence and status 1 if standard output cannot be written.

    What is still in a buffer at the end counts too. A reader who has closed the pipe gets no sentence.
    """
    former: Any = sys.stdout
    stream = _checked(former)
    try:
        with contextlib.redirect_stdout(stream):
            try:
                yield
            finally:
                if stream is not None:
                    stream.flush()
    except OutputError as error:
        if stream is not former:
            _discard(stream.fileno())
        if not error.is_closed_pipe:
            _complain(f"{command}: {error}")
        sys.exit(1)


def _checked(stream: Any) -> Any:
    """Such a stream, but one that raises OutputError, if it is the file or the pipe of standard output."""
    standard: Any = sys.__stdout__
    buffer = getattr(stream, "buffer", None)
    # Not a subclass of FileIO: that of a console of Windows writes another encoding.
    if stream is not standard or type(getattr(buffer, "raw", buffer)) is not io.FileIO:
        return stream
    stream.flush()
    raw: Any = _Output(stream.fileno(), "wb", closefd=False)
    return io.TextIOWrapper(
        raw if isinstance(buffer, io.FileIO) else io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _complain(text: str) -> None:
    """Say it on standard error, which may be as full as standard output."""
    try:
        click.echo(text, err=True)
    except OSError:
        _discard(sys.stderr.fileno())


def _discard(descriptor: int) -> None:
    """Let what is still in a buffer go nowhere. The interpreter writes it at its end, and would complain with status
    120.
    """
    with open(os.devnull, "wb", buffering=0) as nowhere:
        os.dup2(nowhere.fileno(), descriptor)
