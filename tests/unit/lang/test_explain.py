"""The timeline of a program, in text and as a page."""

import html.parser
import math
from pathlib import Path
from typing import Any

import pytest

from headrace import BaseBackend, assistant, function, gen, select, user
from headrace.lang.choices import ChoicesDecision
from headrace.lang.program_errors import ProgramError

TOKENS = [[math.log(0.75), 1, "Pa"], [math.log(0.25), 2, "<ris>"], [None, 3, "."]]


class Told(BaseBackend):
    """Answers with all that a server tells."""

    def generate(self, s: Any, sampling_params: Any) -> Any:
        if "fail" in s.text_:
            raise ValueError("no <luck>")
        meta = {"prompt_tokens": 20, "cached_tokens": 5, "completion_tokens": 3}
        return "Pa<ris>.", {**meta, "output_token_logprobs": TOKENS}

    def select(self, s: Any, choices: Any, temperature: Any, choices_method: Any) -> Any:
        meta = {"prompt_tokens": 30, "cached_tokens": 25}
        return ChoicesDecision("no", {**meta, "normalized_prompt_logprobs": [-2.5, -0.125]})


@function
def capital(s, question):
    s += user(question)
    s += assistant(gen("answer", return_logprob=True))
    s += user("Sure?")
    s += assistant(select("sure", ["yes", "no"]))


class Page(html.parser.HTMLParser):
    """What a browser would load, and the text it would show."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.titles: list[str] = []
        self.shown = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href")]
        self.titles += [value for name, value in attrs if name == "title"]

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_a_line_an_event_with_tokens_and_a_total() -> None:
    state = capital.run("France?", backend=Told())
    state.sync()
    lines = state.explain().splitlines()
    (answer,) = [line for line in lines if line.startswith("gen answer")]
    assert [each for each in answer.split() if each.isdigit()] == ["20", "5", "3"]
    assert '"Pa<ris>."' in answer
    (sure,) = [line for line in lines if line.startswith("select sure")]
    assert '"no"' in sure
    assert [line.split()[1] for line in lines if line.startswith("role_begin")] == [
        *("user", "assistant"),
        *("user", "assistant"),
    ]
    assert lines[-1].startswith("2 requests: 50 prompt tokens (30 cached), 3 generated, ")


def test_the_page_stands_alone_and_escapes_what_the_model_wrote(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    state = capital.run("<script>alert(1)</script>", backend=Told())
    state.sync()
    assert state.explain(html=path) == state.explain()
    page = Page(path.read_text())
    assert not page.links
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert state.text() in page.shown
    assert "5 of 20 prompt tokens cached (25%)" in page.shown
    assert {"75.0%", "25.0%"} <= set(page.titles)
    assert "-0.1250" in page.shown
    assert "capital" in page.shown


def test_what_failed_is_in_both(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    state = capital.run("fail", backend=Told())
    with pytest.raises(ProgramError):
        _ = state["answer"]
    assert "!! no <luck>" in state.explain(html=path)
    assert "no <luck>" in Page(path.read_text()).shown


def test_a_program_that_did_nothing(tmp_path: Path) -> None:
    @function
    def nothing(s):
        pass

    state = nothing.run(backend=Told())
    assert state.explain(html=tmp_path / "page.html").splitlines()[-1].startswith("0 requests")
