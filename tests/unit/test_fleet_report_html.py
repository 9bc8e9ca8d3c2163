"""A fleet's report as HTML, without a browser: what is in it, and what names of machines cannot do."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from ndpy.fleet.report import html
from ndpy.tools.page import element, table
from tests.kit.reports import HOSTILE, report

BAD = report(24, rounds=12, slow={"n3": 0.8}, dead=("n7",))
NASTY = '"><img src=x onerror=alert(1)>\x1b\ud800&amp;'


class Reader(HTMLParser):
    """Elements, attributes and texts, and elements that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.texts: list[str] = []
        self.opened: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in {"meta", "input"}:
            self.opened.append(tag)

    def handle_endtag(self, tag):
        assert self.opened.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_every_element_is_closed_and_the_parts_are_there():
    read = Reader(html.to_text(BAD))
    assert read.opened == []
    for text in ("fleet: 2 suspects", "n[3,7]", "node n3", "Pairs", "Distribution", "Outliers", "Machines", "n24"):
        assert text in read.texts
    # Two matrices and two histograms.
    assert read.tags.count("svg") == 4


def test_nothing_is_loaded_from_elsewhere():
    text = html.to_text(BAD)
    assert not re.search(r"https?:|url\(|@import", text)
    assert {name for name, _ in Reader(text).attributes} & {
        "src",
        "href",
        "action",
        "data",
        "onclick",
        "onload",
    } == set()
    policies = [value for name, value in Reader(text).attributes if name == "content" and "src" in value]
    assert len(policies) == 1
    assert policies[0].startswith("default-src 'none'; ")


@pytest.mark.parametrize("name", [HOSTILE, NASTY])
def test_a_name_of_a_machine_is_text_and_nothing_else(name):
    # A name of the same length, which a table treats in the same way.
    usual, hostile = (
        Reader(html.to_text(report(24, rounds=12, slow={"n3": 0.8}, dead=("n7",), names={9: each})))
        for each in ("n" * len(name), name)
    )
    assert hostile.tags == usual.tags
    assert [attribute for attribute, _ in hostile.attributes] == [attribute for attribute, _ in usual.attributes]
    shown = name.replace("\x1b", "?").replace("\ud800", "?")
    assert shown in hostile.texts


def test_every_text_from_machines_is_escaped():
    made = report(4)
    machine = made.machines[0]
    machine.facts[HOSTILE] = machine.facts["mlx5_0 MTU"] = HOSTILE
    machine.counters[HOSTILE] = 3
    machine.findings[0].update(check=HOSTILE, verdict="FAIL")
    assert Reader(html.to_text(made)).tags.count("script") == 1


def test_a_report_of_nothing_is_a_page():
    assert "fleet: no suspects" in Reader(html.to_text(report(0))).texts


def test_4096_nodes_are_a_small_file():
    text = html.to_text(report(4096, slow={"n77": 0.8}))
    assert len(text) < 1_500_000
    assert "64 nodes in each row and column" in text
    assert Reader(text).tags.count("tr") > 4096


@pytest.mark.parametrize(("nodes", "aggregated"), [(256, False), (257, True)])
def test_the_matrix_is_aggregated_above_256_nodes(nodes, aggregated):
    assert ("nodes in each row and column" in html.to_text(report(nodes, rounds=2))) == aggregated


def test_cells_and_attributes_are_escaped():
    assert element("p", "<b>", element("i", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<i>&amp;</i></p>'
    assert "&lt;b&gt;" in table(["<b>"], [["<b>", 1, 1.5]], "x")
    assert "<b>" not in table(["<b>"], [["<b>", 1, 1.5]], "<b>")
