"""The options of commands that write a report, and the writing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ndpy.fleet.report import document, html, junit, openmetrics
from ndpy.fleet.results import Report
from ndpy.tools.output import STDOUT, output_option, write_all, write_report

#: Each form: its option, the help of that, and what makes the text.
FORMS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "json": ("Write the report to FILE as JSON. `ndpy report diff` compares two of them.", document.to_text),
    "junit": (
        "Write the report to FILE as JUnit XML. Each node is a test, which fails if it is a suspect.",
        junit.to_text,
    ),
    "openmetrics": (
        "Write the report to FILE as OpenMetrics, for the folder of a node exporter. Its name has to end in .prom.",
        openmetrics.to_text,
    ),
    "html": ("Write the report to FILE as one HTML file with tables and plots.", html.to_text),
}


def report_options(function: Any) -> Any:
    """The options of all forms, as a decorator. Their parameters are called json_file, junit_file, and so on."""
    for name, (help_text, _) in reversed(FORMS.items()):
        function = output_option(name, help_text)(function)
    return function


def write_files(command: str, report: Report, files: dict[str, Path | None]) -> int:
    """Write the forms that were asked for: the values of the parameters of report_options(), by their names.

    Returns the exit status. It is 1 if one cannot be written, which the command says. Those after it are not written.
    """

    def writes(name: str) -> Callable[[Path], None]:
        return lambda path: _write(name, path, FORMS[name][1](report))

    return write_all(command, *((files.get(f"{name}_file"), writes(name)) for name in FORMS))


def _write(name: str, path: Path, text: str) -> None:
    if name == "openmetrics" and path != STDOUT:
        openmetrics.replace(path, text)
    else:
        write_report(path, text.encode())
