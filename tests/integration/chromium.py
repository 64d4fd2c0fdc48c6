"""The system's Chromium, driven by Playwright; its own browser cannot be had from a package index."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.integration.service import WAIT_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run the browser for the `with` block; what is expected of its pages may take `WAIT_S`."""
    expect.set_options(WAIT_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--disable-gpu", "--disable-quic"])
        yield browser
        browser.close()


def complaints_of(page: Page) -> list[str]:
    """Return the list that errors and warnings on a page's console come into, violations of its policy among them."""
    found: list[str] = []
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    return found
