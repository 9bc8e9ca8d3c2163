"""Debian's chromium without a screen. `rig/setup.sh browser` installs what it needs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DESKTOP, PHONE = (1280, 900), (390, 844)
LIGHT, DARK = "light", "dark"
# Chromium would look for its maker's servers.
QUIET = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextlib.contextmanager
def started(folder: Path) -> Iterator[Any]:
    """A browser that keeps its files in this folder."""
    from selenium import webdriver

    chromium, driver_path = shutil.which("chromium"), shutil.which("chromedriver")
    assert chromium, "no chromium: rig/setup.sh browser installs it"
    assert driver_path, "no chromedriver: rig/setup.sh browser installs it"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for option in (*QUIET, f"--user-data-dir={folder}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(driver_path))
    try:
        driver.set_page_load_timeout(60)
        yield driver
    finally:
        driver.quit()


def look(browser: Any, size: tuple[int, int], scheme: str) -> None:
    """Be a screen of this size, of somebody who likes light or dark."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "screen", "features": features})


def brightness(color: str) -> float:
    """Of a color in CSS: 0 is black and 1 white."""
    red, green, blue = (int(part) for part in color[color.index("(") + 1 : color.index(")")].split(",")[:3])
    return (0.2126 * red + 0.7152 * green + 0.0722 * blue) / 255
