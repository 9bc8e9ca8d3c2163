"""The pages of `ndpy doctor --html`, `ndpy smoke --html` and `ndpy perf --html`."""

from __future__ import annotations

import html.parser
import json
import re

import pytest
from click.testing import CliRunner

from ndpy.tools.cli import main
from ndpy.tools.page import results
from tests.kit.reports import HOSTILE

FINDING = {"check": "MTU", "verdict": "FAIL", "message": HOSTILE, "remedy": "set it to 4096", "problem": "mtu"}
CHECK = {
    "group": "data",
    "name": "send",
    "claim": "bytes arrive",
    "verdict": "FAIL",
    "reason": HOSTILE,
    "reference": "a page",
    "seconds": 0.25,
    "figures": {},
}
SMOKE = {
    "adapter": "mlx5_0",
    "provider": "verbs",
    "software": False,
    "seconds": 3.2,
    "interrupted": False,
    "counters": {1: {"port_rcv_errors": 7}},
    "summary": {"pass": 4, "fail": 1, "known": 0, "skip": 2},
    "checks": [CHECK],
    "not_run": ["data/read"],
}
BUCKETS = [{"from_us": 1.0, "to_us": 1.2, "count": 90}, {"from_us": 1.2, "to_us": 1.4, "count": 10}]
PERF = {
    "test": "write_lat",
    "adapter": "mlx5_0",
    "addresses": ["192.0.2.1"],
    "peer": {"host": HOSTILE},
    "passed": False,
    "interrupted": False,
    "error": "",
    "broken_limits": ["64 bytes: the median is 3 us, the limit 2 us"],
    "results": [{"bytes": 64, "iterations": 100, "min_us": 1.25, "p99.9_us": None, "histogram": BUCKETS}],
}


class Reader(html.parser.HTMLParser):
    """The text of a page, and its elements that load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.loads, self.tags = "", [], []
        self.feed(text)
        self.close()

    def handle_data(self, data):
        self.text += f" {data}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.loads += [value for name, value in attributes if name in ("src", "href")]


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (results.doctor([FINDING]), ["0 PASS, 0 WARN, 1 FAIL", "set it to 4096 (ndpy explain mtu)"]),
        (results.smoke(SMOKE), ["4 pass, 1 fail, 0 known, 2 skip in 3.2 s", "not run: data/read", "port_rcv_errors",
         "data/send"]),
        (results.perf(PERF), ["the median is 3 us, the limit 2 us", "p99.9_us", "64 bytes, 100 iterations", "1.40 us"]),
    ],
)  # fmt: skip
def test_a_page_has_the_results_and_loads_nothing(made, words):
    page = Reader(made)
    assert all(word in page.text for word in words)
    # Texts of the adapter and of the other side are text.
    assert HOSTILE in page.text
    assert (page.loads, page.tags.count("script")) == ([], 1)
    assert '<p class="bad">' in made


def test_a_histogram_has_a_bar_for_each_bucket():
    heights = [float(height) for height in re.findall(r'class="bar"[^>]* height="([0-9.]+)"', results.perf(PERF))]
    assert heights == pytest.approx([140, 140 / 9], abs=0.1)


def test_without_faults_the_verdict_is_good():
    good = {**SMOKE, "summary": {**SMOKE["summary"], "fail": 0}, "counters": None, "checks": [], "not_run": []}
    for made in (results.doctor([]), results.smoke(good), results.perf({**PERF, "passed": True, "results": []})):
        assert '<p class="good">' in made


@pytest.mark.parametrize("command", [["doctor"], ["smoke", "--only", "enumerate"]])
def test_html_can_go_to_standard_output(monkeypatch, command):
    """Then everything else goes to standard error."""
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    result = CliRunner().invoke(main, [*command, "--html", "-"])
    assert result.stdout.startswith("<!doctype html>")
    assert result.stdout.rstrip().endswith("</html>")


def test_the_page_and_the_json_of_a_run_agree(tmp_path, monkeypatch):
    monkeypatch.setenv("NDPY_ADAPTER", "soft0")
    page, document = tmp_path / "run.html", tmp_path / "run.json"
    CliRunner().invoke(main, ["doctor", "soft0", "--html", str(page)])
    found = CliRunner().invoke(main, ["doctor", "soft0", "--json"])
    document.write_text(found.stdout)
    text = Reader(page.read_text("utf-8")).text
    for finding in json.loads(document.read_text()):
        assert finding["check"] in text
