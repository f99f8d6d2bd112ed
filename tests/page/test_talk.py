"""The conversation at `/`, in headless Chromium."""

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.browser import Page
from tests.support.talk import (
    LAST,
    READY,
    Script,
    ask,
    fill,
    scripted_server,
    settle,
    turns,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Script]]:
    folder: Path = tmp_path_factory.mktemp("server")
    parsers = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
    with scripted_server(folder, 0.002, **parsers) as served:
        yield served


@pytest.fixture
def page(server: tuple[str, Script], new_page: Callable[..., Page]) -> Page:
    page = new_page(server[0])
    page.wait(READY)
    return page


def test_a_conversation(page: Page, server: tuple[str, Script]) -> None:
    ask(page, "hello")
    assert settle(page).startswith("You said: hello")
    ask(page, "again")
    assert settle(page).startswith("You said: again")
    assert "hello" in server[1].prompts[-1]
    assert "You said: hello" in server[1].prompts[-1]
    assert page.text("#status") == "The answer is complete."
    assert "tokens" in page.text(".message.assistant .cost")


def test_what_a_model_writes_is_never_markup(page: Page) -> None:
    ask(page, "attack")
    shown = settle(page)
    for text in ("<script>window.hacked = 1</script>", "<img src=x onerror=", "<b>bold</b>"):
        assert text in shown
    for text in ("<i>code</i>", "<svg onload=window.hacked=5>", "<u>a</u>", "<iframe src=/x>"):
        assert text in shown
    # Nothing of it is an element, while the Markdown around it is.
    inside = f"{LAST}.querySelectorAll('script,img,svg,b,i,u,iframe').length"
    assert page.evaluate(inside) == 0
    assert page.evaluate(f"{LAST}.querySelectorAll('strong,table,pre').length") == 3
    links = f"[...{LAST}.querySelectorAll('a')].map(a => a.href)"
    assert page.evaluate(links) == ["https://outside.example/p.png"]
    assert page.evaluate("typeof window.hacked") == "undefined"


def test_markdown(page: Page) -> None:
    ask(page, "markdown")
    settle(page)
    parts = f"[...{LAST}.querySelectorAll('.text *')].map(e => e.tagName).join(' ')"
    found = page.evaluate(parts).lower()
    assert "h3 p em strong code ul li li ol li blockquote p figure" in found
    assert page.texts(".message .code code") == ["print('<hi>')"]
    page.click(".message .code button", "Copy")
    page.wait("[...document.querySelectorAll('.code button')].some(e => e.innerText != 'Copy')")


def test_stop_keeps_what_was_written(page: Page) -> None:
    ask(page, "long")
    page.wait(f"{LAST}.querySelector('.text').innerText.length > 30")
    page.press("Escape")
    stopped = settle(page)
    assert 30 < len(stopped) < 1900
    assert page.text(".message.assistant .note") == "Stopped."
    ask(page, "and on")
    assert settle(page).startswith("You said: and on")


def test_edit_regenerate_and_branch(page: Page, server: tuple[str, Script]) -> None:
    ask(page, "frist")
    first = settle(page)
    page.click(".message.assistant button", "Regenerate")
    second = settle(page)
    assert first != second
    assert turns(page) == "2/2"
    page.click(".turns button", "‹")
    assert page.text(".message.assistant .text") == first

    page.click(".message.user button", "Edit")
    page.evaluate("document.activeElement.select()")
    page.type("first")
    page.click(".message.user button", "Send")
    assert settle(page).startswith("You said: first")
    assert "frist" not in server[1].prompts[-1]
    page.click(".message.user .turns button", "‹")
    assert page.text(".message.user .text") == "frist"

    page.click(".message.assistant button", "Branch")
    ask(page, "further")
    assert settle(page).startswith("You said: further")
    assert "frist" in server[1].prompts[-1]
    assert page.texts(".title") == ["frist (branch)", "frist"]
    page.click(".title:not([aria-current])")
    assert len(page.texts(".message")) == 2


def test_thoughts_are_folded(page: Page, server: tuple[str, Script]) -> None:
    ask(page, "think")
    assert settle(page) == "Then I answer."
    assert not page.evaluate(f"{LAST}.querySelector('.thoughts').open")
    page.click(".thoughts summary")
    assert "First I think." in page.text(".message.assistant .thoughts")
    ask(page, "next")
    settle(page)
    assert "First I think." not in server[1].prompts[-1]


TOOLS = """[{"type": "function", "function": {"name": "weather",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]"""


def test_a_tool_is_called_and_answered(page: Page, server: tuple[str, Script]) -> None:
    fill(page, "tools", TOOLS)
    ask(page, "tool")
    page.wait("document.querySelector('.results button')")
    assert "calls weather" in page.text(".call")
    assert '"city": "Bern"' in page.text(".call")
    page.evaluate("document.querySelector('.results textarea').focus()")
    page.type("sunny")
    page.click(".results button")
    assert settle(page) == "It is sunny in Bern."
    assert "<tool_call>weather</tool_call>" in server[1].prompts[-1]
    assert page.text(".message.tool .text") == "sunny"


def test_a_control_that_is_not_json_is_pointed_at(page: Page) -> None:
    fill(page, "schema", "{oops")
    ask(page, "hello")
    page.wait("document.querySelector('[name=schema]').getAttribute('aria-invalid')")
    assert page.text("#status").startswith("JSON schema: ")


def test_token_probabilities(page: Page) -> None:
    page.click("label", "Token probabilities")
    ask(page, "hi")
    settle(page)
    page.click(".message.assistant button", "Tokens")
    tokens = page.texts(".token")
    assert "".join(tokens).startswith("You said: hi")
    page.evaluate("document.querySelector('.token').focus()")
    page.press("ArrowRight")
    # As the fake engine has it: -0.5 for each token; a, b, c at -1, -2, -3.
    assert page.text(".alternatives").startswith('"o" 60.7%; most probable: "a" 36.8%, "b" 13.5%')


def test_a_reload_shows_the_same(page: Page) -> None:
    fill(page, "system", "Be brief.")
    ask(page, "kept")
    answer = settle(page)
    page.evaluate("document.body.dataset.ready = ''")
    page.call("Page.reload")
    page.wait(f"{READY} && document.querySelector('.message.assistant')")
    assert page.text(".message.assistant .text").strip() == answer
    assert page.evaluate("document.querySelector('[name=system]').value") == "Be brief."
    page.click("#new")
    assert page.texts(".message") == []
    page.click(".title", "kept")
    assert len(page.texts(".message")) == 2
    page.click(".remove")
    page.click(".remove", "Delete?")
    page.wait("!document.querySelector('.title')")


def test_a_request_as_a_program(page: Page, server: tuple[str, Script]) -> None:
    fill(page, "top_k", "7")
    ask(page, "it's")
    settle(page)
    page.click("#as-program")
    curl, python = page.texts("#program-list code")
    assert f"curl {server[0]}/v1/chat/completions" in curl
    assert "it'\\''s" in curl
    compile(python, "program", "exec")
    assert "extra_body={" in python
    assert '"top_k": 7' in python


def test_by_keyboard_alone(page: Page) -> None:
    # From the top of the page to the composer, without a mouse.
    page.evaluate("document.activeElement.blur()")
    for _ in range(40):
        page.press("Tab")
        if page.evaluate("document.activeElement.id") == "prompt":
            break
    page.type("one")
    page.press("Enter", shift=True)
    page.type("two")
    page.press("Enter")
    settle(page)
    assert page.text(".message.user .text") == "one\ntwo"
    names = []
    for _ in range(60):
        page.press("Tab")
        names.append(page.evaluate("document.activeElement.innerText"))
        if names[-1] == "Regenerate":
            break
    page.press("Enter")
    settle(page)
    assert turns(page) == "2/2"


def test_a_narrow_window(server: tuple[str, Script], new_page: Callable[..., Page]) -> None:
    page = new_page(server[0], 360, 640)
    page.wait(READY)
    ask(page, "markdown")
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate("document.querySelector('#send').getBoundingClientRect().bottom") <= 640


def test_every_control_has_a_name(page: Page) -> None:
    ask(page, "hello")
    settle(page)
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "spinbutton", "checkbox", "combobox", "tab"}
    controls = [each for each in nodes if each.get("role", {}).get("value") in roles]
    assert len(controls) > 15
    assert [each for each in controls if not each.get("name", {}).get("value")] == []


def test_other_clients_errors_need_the_admin_key(
    tmp_path: Path, new_page: Callable[..., Page]
) -> None:
    with scripted_server(tmp_path, 0.0, api_key="user", admin_api_key="boss") as (url, _):
        page = new_page(url)
        page.wait("document.querySelector('#key-dialog[open]')")
        page.type("user")
        page.press("Enter")
        page.wait(READY)
        page.click("#tab-watch")
        page.wait("document.querySelector('#replicas tr')")
        assert httpx.get(f"{url}/model_info").status_code == 401
        assert page.texts("#errors tr") == []
        page.click("#admin-key")
        page.type("boss")
        page.press("Enter")
        page.wait("document.querySelector('#errors tr')")
        assert page.texts("#errors td")[1:3] == ["401", "GET /model_info"]
        assert "boss" not in page.evaluate("JSON.stringify([localStorage, sessionStorage])")
