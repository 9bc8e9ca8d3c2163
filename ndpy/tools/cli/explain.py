"""`ndpy explain`: what an error means, and what to do about it."""

from __future__ import annotations

import json

import click
from rich.markdown import Markdown

from ndpy import problems
from ndpy.tools.output import JsonCommand, console, new_table, print_table


@click.command(cls=JsonCommand, short_help="Say what an error means, and what to do about it.")
@click.argument("word", nargs=-1)
@click.option("--scenario", is_flag=True, help="Print only the scenario for `ndpy faults run -f` that reproduces it.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON, as a list of everything that WORD can mean.")
def command(word: tuple[str, ...], scenario: bool, as_json: bool) -> None:
    """Say what WORD means: causes, the command that tells them apart, the remedy.

    WORD is the word at the end of an error, such as rnr-retry. It can also be the name or the number of a status, an
    event or an errno: IBV_WC_RETRY_EXC_ERR, 12, RDMA_CM_EVENT_REJECTED, ENOMEM, ND_IO_TIMEOUT, 0xC00000B5. The name of
    an error of ndpy works too. Case makes no difference.

    Without WORD, all words are listed. For an unknown one, similar words are shown, and the exit status is 2.
    """
    asked = " ".join(word)
    found = problems.named(asked) if word else list(problems.all_problems())
    if not found:
        like = problems.near(asked)
        hint = f"; similar are {', '.join(like)}" if like else ""
        raise click.UsageError(f"there is no page on {asked!r}{hint}. `ndpy explain` lists all words")
    if scenario:
        if not word:
            raise click.UsageError("--scenario needs a WORD")
        if found[0].scenario is None:
            raise click.UsageError(f"no scenario reproduces {found[0].word}. `ndpy explain {found[0].word}` says why")
        click.echo(found[0].scenario, nl=False)
    elif as_json:
        click.echo(json.dumps([each.to_dict() for each in found], indent=2))
    elif not word:
        table = new_table("word", "meaning")
        for each in found:
            table.add_row(each.word, each.summary)
        print_table(table, wraps=True)
    else:
        _show(asked, found)


def _show(asked: str, found: list[problems.Problem]) -> None:
    """Print the first of these, and name the others."""
    text = f"# {found[0].word}\n\n{found[0].text}\n"
    if found[1:]:
        text += f"\n**{asked} can also be:**\n\n"
        text += "".join(f"- `ndpy explain {each.word}`: {each.summary}\n" for each in found[1:])
    out = console()
    if out.is_terminal:
        out.print(Markdown(text))
    else:
        click.echo(text, nl=False)
