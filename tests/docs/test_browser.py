"""The site in a real browser: Debian's chromium without a screen, which takes a minute. Pictures of all pages are left
in .rig/results/site, to be looked at.

`rig/setup.sh browser` installs what this needs. The tests run under NDPY_STRESS=1, and fail then without it.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = ROOT / ".rig/results/site"

if not os.environ.get("NDPY_STRESS"):
    pytest.skip("a browser: NDPY_STRESS", allow_module_level=True)
# With full counts a browser that is missing is a failure.
from selenium.common.exceptions import TimeoutException  # noqa: E402
from selenium.webdriver.support import wait  # noqa: E402

from tests.kit.browser import DARK, DESKTOP, LIGHT, PHONE, brightness, look  # noqa: E402

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Of a server for the site, on loopback."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def pages(site: Path) -> list[str]:
    return sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html") if path.parts[-2] != "_modules")


@pytest.mark.parametrize(("size", "scheme"), [(DESKTOP, LIGHT), (DESKTOP, DARK), (PHONE, LIGHT), (PHONE, DARK)])
def test_each_page_fits_its_screen_and_has_no_error(
    site: Path, address: str, browser: Any, size: Any, scheme: str
) -> None:
    look(browser, size, scheme)
    kind = f"{'phone' if size == PHONE else 'desktop'}-{scheme}"
    wrong = []
    for page in pages(site):
        browser.get(f"{address}/{page}")
        wide = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
        if wide > 1:
            wrong.append(f"{kind} {page}: {wide} pixels wider than the screen")
        wrong += [
            f"{kind} {page}: {line['message']}" for line in browser.get_log("browser") if line["level"] == "SEVERE"
        ]
        script = "return getComputedStyle(document.body).backgroundColor"
        if (brightness(browser.execute_script(script)) > 0.5) != (scheme == LIGHT):
            wrong.append(f"{kind} {page}: the page is not {scheme}")
        picture = PICTURES / kind / page.replace("/", "--").replace(".html", ".png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(picture))
    assert not wrong, "\n".join(wrong)


def test_problems_are_first_in_the_side_bar(address: str, browser: Any) -> None:
    look(browser, DESKTOP, LIGHT)
    browser.get(f"{address}/index.html")
    first = browser.find_element("css selector", ".sidebar-tree a")
    assert first.text == "When something goes wrong"


def test_the_side_bar_shows_the_page_that_is_open(site: Path, address: str, browser: Any) -> None:
    look(browser, DESKTOP, LIGHT)
    in_bar = """
        const bar = document.querySelector(".sidebar-scroll");
        const here = document.querySelector(".sidebar-tree .current-page");
        if (!here) return null;
        const inner = here.getBoundingClientRect(), outer = bar.getBoundingClientRect();
        return [inner.top >= outer.top && inner.top < outer.bottom, bar.scrollTop > 0];
    """
    seen, scrolled = 0, 0
    for page in pages(site):
        browser.get(f"{address}/{page}")
        shown = browser.execute_script(in_bar)
        if shown is not None:
            assert shown[0], f"{page} is not in the part of the side bar that is seen"
            seen += 1
            scrolled += shown[1]
    assert seen > 20
    assert scrolled, "no page is further down than the screen"


@pytest.mark.parametrize(("words", "page"), [("retry", "problems/"), ("memory window", "explained/")])
def test_search_finds_a_page_without_a_server(site: Path, browser: Any, words: str, page: str) -> None:
    look(browser, DESKTOP, LIGHT)
    browser.get(f"file://{site}/search.html?q={words.replace(' ', '+')}")

    def links(driver: Any) -> list[str]:
        return [link.get_attribute("href") for link in driver.find_elements("css selector", "ul.search li a")]

    with contextlib.suppress(TimeoutException):
        wait.WebDriverWait(browser, 60).until(lambda driver: any(page in link for link in links(driver)))
    assert any(page in link for link in links(browser)), links(browser)
