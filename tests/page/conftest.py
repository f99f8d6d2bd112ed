"""A browser for all tests, and pages that show no error and ask no other host."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.browser import CHROMIUM, Browser, Page


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium (Debian: apt-get install chromium)")
    with Browser() as browser:
        yield browser


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Makes pages; at the end none has shown an error or asked another host for anything."""
    pages: list[tuple[Page, str]] = []

    def make(url: str, *size: int, scheme: str = "light") -> Page:
        page = browser.page(*size, scheme=scheme)
        pages.append((page, url))
        page.open(f"{url}/")
        return page

    yield make
    for page, url in pages:
        assert page.errors == []
        outside = [each for each in page.requests if not each.startswith((f"{url}/", "data:"))]
        assert outside == []
