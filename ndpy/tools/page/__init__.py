"""One HTML file without outside links: tables that sort and filter, and plots. Every text is escaped here."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from importlib import resources

_SHORT = 20


class Markup(str):
    """HTML that needs no escape. Everything else is text."""


def escaped(value: object) -> Markup:
    """The value as HTML that shows it. Control characters and lone surrogates show as ?."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape("".join(c if c in "\n\t" or c.isprintable() else "?" for c in str(value))))


def element(tag: str, *content: object, **attributes: object) -> Markup:
    """One element. An underscore ends a name that Python keeps for itself: class_. Others become hyphens."""
    shown = "".join(f' {name.rstrip("_").replace("_", "-")}="{escaped(value)}"' for name, value in attributes.items())
    return Markup(f"<{tag}{shown}>{''.join(map(escaped, content))}</{tag}>")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], label: str) -> Markup:
    """A table that sorts by a click on a column and has a filter.
    A float or an int is aligned and sorted as a number.
    """
    body = []
    for row in rows:
        body.append(f"<tr>{''.join(map(_cell, row))}</tr>")
    heads = "".join(f'<th scope="col"><button type="button">{escaped(name)}</button></th>' for name in columns)
    search = f'<input type="search" placeholder="filter" aria-label="filter {escaped(label)}"><output></output>'
    return Markup(
        f'<div class="table"><p class="filter">{search}</p><div class="wide"><table><thead><tr>{heads}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></div>"
    )


def _cell(value: object) -> str:
    if isinstance(value, int | float):
        return f'<td class="n">{_number(value)}</td>'
    # A short text stays on one line.
    short = len(str(value)) <= _SHORT
    return f"<td class=s>{escaped(value)}</td>" if short else f"<td>{escaped(value)}</td>"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def page(title: str, *sections: tuple[str, Sequence[object]]) -> str:
    """The whole file. sections: heading and content of each. A section without content is left out."""
    style, script = (
        resources.files(__name__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    # The browser runs this script and nothing else, and loads nothing.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    body = "".join(
        element("section", element("h2", heading) if heading else "", *content)
        for heading, content in sections
        if content
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{escaped(title)}</h1>{body}</main><script>{script}</script></body></html>\n"
    )
