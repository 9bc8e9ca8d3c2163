"""`ndpy completion`: lets a shell complete the words of the command ndpy."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "fish", "zsh")
# click asks the program for the words if this variable is set.
_VARIABLE = "_NDPY_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print what makes SHELL complete commands and options of ndpy.

    \b
    In bash, add this line to ~/.bashrc:
        eval "$(ndpy completion bash)"
    In zsh, add this line to ~/.zshrc, after compinit:
        eval "$(ndpy completion zsh)"
    In fish, run this once:
        ndpy completion fish > ~/.config/fish/completions/ndpy.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "ndpy", _VARIABLE).source())
