"""The page with real models behind it: what it watches, explains and sees."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.browser import Page
from tests.support.server import ROOT, ServerProcess, running_server
from tests.support.talk import READY, ask, fill, settle

OPTIONS = ("--enable-metrics", "--enable-cache-report")
DRAWING = ROOT / "examples" / "vision" / "drawing.png"


def test_watch_and_understand(new_page: Callable[..., Page]) -> None:
    server = running_server("demo", *OPTIONS)
    page = new_page(server.url)
    page.wait(READY)
    ask(page, "What is the capital of Japan?")
    assert settle(page) == "The capital of Japan is Tokyo."

    page.click("#tab-watch")
    page.wait("document.querySelectorAll('#plots svg').length == 6")
    titles = page.texts("#plots strong")
    assert titles[0] == "Requests"
    assert "First token after" in titles
    assert page.texts("#replicas tr td")[0] == "0"
    assert "running 0 · queued 0" in page.evaluate(
        "document.querySelector('#plots svg').getAttribute('aria-label')"
    )
    assert server.client.get("/nowhere").status_code == 404
    page.wait("document.querySelector('#errors tr')")
    assert page.texts("#errors td")[1:3] == ["404", "GET /nowhere"]

    page.click("#tab-understand")
    page.click("#tokenize button")
    page.wait("document.querySelector('.chip')")
    told = server.client.post("/tokenize", json={"prompt": "The wheel turns."}).json()
    ids = page.texts(".chip small")
    assert ids == [str(each) for each in told["tokens"]]
    assert "".join(page.texts(".chip span")) == "The wheel turns."
    assert page.text("#tokens").startswith(f"{len(ids)} tokens, 16 bytes")

    page.click("#explain")
    page.wait("document.querySelector('meter')")
    assert "prompt tokens would come from the cache." in page.text("#explained")
    assert "leaves the cache at token" in page.text("#explained")
    assert "ms" in page.text("#times")

    # By itself the latest answer's.
    page.click("#explain-request button")
    page.wait("document.querySelector('#request-explained tr')")
    assert page.text("#request-explained p").startswith("chatcmpl-")
    stages = page.texts("#request-explained tr th")
    assert {"front", "queue", "prompt", "decode"} <= set(stages)


def test_answers_follow_a_schema(new_page: Callable[..., Page]) -> None:
    page = new_page(running_server("demo", *OPTIONS).url)
    page.wait(READY)
    schema = {
        "type": "object",
        "properties": {"capital": {"enum": ["Bern", "Tokyo"]}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    fill(page, "schema", json.dumps(schema))
    fill(page, "max_tokens", "40")
    fill(page, "temperature", "0")
    ask(page, "What is the capital of Japan?")
    assert json.loads(settle(page)) in ({"capital": "Bern"}, {"capital": "Tokyo"})


def test_a_key_is_asked_for(new_page: Callable[..., Page]) -> None:
    with ServerProcess("--api-key", "SECRET", "--fastapi-root-path", "/llm") as server:
        server.wait_ready()
        page = new_page(f"{server.url}/llm")
        page.wait("document.querySelector('#key-dialog[open]')")
        assert page.errors == []
        page.type("wrong")
        page.press("Enter")
        page.wait("document.querySelector('#key-refusal').innerText.includes('not take this key')")
        page.wait("document.querySelector('#key-dialog[open]')")
        # The browser tells of the refusal.
        assert [each for each in page.errors if " 401 " not in each] == []
        page.errors.clear()
        page.evaluate("document.querySelector('#key').select()")
        page.type("SECRET")
        page.press("Enter")
        page.wait(READY)
        ask(page, "What is 2 * 2?")
        assert settle(page)
        assert page.evaluate("localStorage.length + sessionStorage.length") == 1
        page.evaluate("document.body.dataset.ready = ''")
        page.call("Page.reload")
        page.wait(READY)
        page.wait("document.querySelector('.message.assistant')")


def test_an_image_is_seen(new_page: Callable[..., Page], tmp_path: Path) -> None:
    server = running_server("demo", "--model-path", "demo-vision")
    page = new_page(server.url)
    page.wait(READY)
    page.attach("#files", DRAWING)
    page.wait("document.querySelector('#attached img')")
    ask(page, "What is in the image?")
    answer = settle(page)
    assert any(word in answer for word in ("circle", "square", "triangle", "star")), answer
    assert page.evaluate("document.querySelector('.message.user img').naturalWidth") > 0
