"""The page's Markdown, on random and hostile texts."""

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.browser import Page
from tests.support.talk import scripted_server

SHOW = """
(async texts => {
  const { showMarkdown } = await import("/page/markdown.js");
  return texts.map(text => {
    const parent = document.createElement("div");
    const begun = performance.now();
    showMarkdown(parent, text);
    for (const each of parent.querySelectorAll("figcaption")) each.remove();
    const names = [...parent.querySelectorAll("*")].map(each => each.localName);
    return [parent.textContent, names, performance.now() - begun];
  });
})(%s)
"""
ELEMENTS = {
    *("p", "h3", "h4", "h5", "h6", "hr", "ul", "ol", "li", "blockquote", "figure", "pre", "code"),
    *("table", "thead", "tbody", "tr", "th", "td", "div", "strong", "em", "s", "a", "br"),
}
HOSTILE = [
    *(mark * 20_000 for mark in ("*", "_", "`", "[", "~", "a*", "**a ", "_a ", "[a](", "> ")),
    *(mark * 5_000 for mark in ("- a\n", "|a|\n|-|\n", "> - ", "`a``b", "~~a", "\\\\", "# a\n")),
    "".join(f"{'  ' * depth}- a\n" for depth in range(500)),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("server")
    with scripted_server(folder, 0.0) as (url, _):
        yield url


def show(page: Page, texts: list[str]) -> list[tuple[str, list[str], float]]:
    found: list[tuple[str, list[str], float]] = page.evaluate(SHOW % json.dumps(texts))
    return found


def test_no_letter_is_lost_and_no_other_element_made(
    url: str, new_page: Callable[..., Page]
) -> None:
    page = new_page(url)
    page.wait("document.body?.dataset.ready")
    draw = random.Random(7)
    parts = ["a", "b", "c", " ", " ", "\n", "\n", "\n\n", "  ", *"*_`~#>|-+.[]()\\!<&", "1.", "**"]
    parts += ["- ", "> ", "|-|-|\n", "<b>", "<script>", "&lt;", "](", "__"]
    texts = ["".join(draw.choices(parts, k=draw.randrange(1, 60))) for _ in range(2000)]
    # What stands beside a fence is the code's language.
    texts = [text for text in texts if "```" not in text and "~~~" not in text]
    assert len(texts) > 1000
    for text, (shown, names, _) in zip(texts, show(page, texts), strict=True):
        assert re.findall("[a-z]", shown) == re.findall("[a-z]", text), text
        assert set(names) <= ELEMENTS, text


def test_a_hostile_text_takes_no_time(url: str, new_page: Callable[..., Page]) -> None:
    page = new_page(url)
    page.wait("document.body?.dataset.ready")
    # Each takes a tenth of a second; what is quadratic in its length takes minutes.
    for text in HOSTILE:
        ((_, _, milliseconds),) = show(page, [text])
        assert milliseconds < 5000, text[:20]
