"""Writes the man pages of the command ndpy into share/man/man1, from its own help: `.venv/bin/python rig/man_pages.py`.

Each command has a page, and its sub-commands are sections of it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from ndpy.tools.cli import main

FOLDER = Path(__file__).resolve().parents[1] / "share/man/man1"


def escaped(text: str) -> str:
    """Text in the language of man pages."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\n".join(f"\\&{line}" if line.startswith((".", "'")) else line for line in text.splitlines())


def paragraphs(text: str | None) -> Iterator[str]:
    """The paragraphs of a help. Those that begin with a backspace are not filled, and a form feed ends the help."""
    for paragraph in inspect.cleandoc(text or "").partition("\f")[0].split("\n\n"):
        if paragraph.startswith("\b"):
            yield f".nf\n{escaped(paragraph[1:].strip(chr(10)))}\n.fi"
        elif paragraph.strip():
            yield escaped(" ".join(paragraph.split()))


def parameters(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1]:
            names, text = record
            yield f".TP\n.B {escaped(names)}\n{escaped(' '.join(text.split()))}"


def synopsis(command: click.Command, context: click.Context) -> str:
    words = " ".join(command.collect_usage_pieces(context))
    return f".B {escaped(context.command_path)}\n{escaped(words)}"


def subcommands(command: click.Command, context: click.Context) -> Iterator[tuple[click.Command, click.Context]]:
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            if found is not None and not found.hidden:
                yield found, click.Context(found, parent=context, info_name=name)


def body(command: click.Command, context: click.Context) -> Iterator[str]:
    """The synopsis, the description and the options of a command, and then its sub-commands."""
    yield f".SH SYNOPSIS\n{synopsis(command, context)}"
    yield ".SH DESCRIPTION\n" + "\n.PP\n".join(paragraphs(command.help))
    yield ".SH OPTIONS\n" + "\n".join(parameters(command, context))
    for sub, inner in subcommands(command, context):
        yield f".SH {escaped(inner.command_path).upper()}\n{synopsis(sub, inner)}"
        yield ".PP\n" + "\n.PP\n".join(paragraphs(sub.help))
        yield "\n".join(parameters(sub, inner))


def page(command: click.Command, context: click.Context, rest: list[str]) -> str:
    name = context.command_path.replace(" ", "-")
    parts = [
        f'.TH {escaped(name.upper())} 1 "" ndpy "Commands of ndpy"',
        f".SH NAME\n{escaped(name)} \\- {escaped(command.get_short_help_str(200))}",
        *rest,
    ]
    return "\n".join(part for part in parts if part) + "\n"


def pages() -> dict[str, str]:
    """Each page by the name of its file."""
    root = click.Context(main, info_name="ndpy", max_content_width=200, **main.context_settings)
    made = {}
    named = []
    for command, context in subcommands(main, root):
        name = context.command_path.replace(" ", "-")
        made[f"{name}.1"] = page(command, context, [*body(command, context), ".SH SEE ALSO\n.BR ndpy (1)"])
        named.append(f".TP\n.BR {escaped(name)} (1)\n{escaped(command.get_short_help_str(200))}")
    own = [
        f".SH SYNOPSIS\n{synopsis(main, root)}",
        ".SH DESCRIPTION\n" + "\n.PP\n".join(paragraphs(main.help)),
        ".SH OPTIONS\n" + "\n".join(parameters(main, root)),
        ".SH COMMANDS\n" + "\n".join(named),
    ]
    return {"ndpy.1": page(main, root, own), **made}


if __name__ == "__main__":
    wanted = pages()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.1"):
        if old.name not in wanted:
            old.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(wanted)} pages in {FOLDER}\n")
