"""Positions of thoughts in a text, compared with the reasoning parsers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.reasoning_parsers.reasoning_parser import thought_texts
from openai_api.reasoning_parsers.registry import REASONING_PARSERS
from runtime.text.thoughts import ThoughtScan

PROPERTY = settings(max_examples=150, deadline=None, derandomize=True, database=None)
# One splits nothing, and the tags stay in the content; the other's outputs are made of messages.
KINDS = [name for name in REASONING_PARSERS if name not in ("minimax-append-think", "gpt-oss")]
MESSAGES = [
    "<|channel|>analysis<|message|>a thought\n<|end|>",
    "<|start|>assistant<|channel|>analysis<|message|> more<|end|>",
    "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>",
    "<|channel|>final<|message|>\nThe answer: analysis",
    "<|start|>assistant<|channel|>final<|message|>Yes <| no\n",
]


def pieces_of(kind: type) -> st.SearchStrategy[str]:
    tags = [kind.open_tag, kind.close_tag, *kind.ends_before, *kind.call_opens, *kind.markers]
    cut = [tag[: len(tag) // 2] for tag in tags]
    return st.sampled_from([*tags, *cut, " ", "\n", "a", "b c", "", "<"])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("may_call", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_the_answer_is_the_parsers(name: str, may_call: bool, is_open: bool) -> None:
    kind = REASONING_PARSERS.load(name)

    @PROPERTY
    @given(st.lists(pieces_of(kind), max_size=10))
    def check(pieces: list[str]) -> None:
        parser = kind(prompt_is_open=is_open, may_call=may_call)
        scan = ThoughtScan(thought_texts(kind, prompt_is_open=is_open, may_call=may_call))
        split = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        parts = [part for piece in pieces for part in scan.feed(piece)] + scan.finish()
        text = "".join(pieces)
        assert "".join(part.text for part in parts) == text
        answer = "".join(part.text for part in parts if part.is_answer)
        content = "".join(each.content for each in split)
        assert answer == content

    check()


@PROPERTY
@given(st.lists(st.sampled_from(MESSAGES), max_size=5), st.integers(1, 30))
def test_the_answer_is_what_the_messages_say(messages: list[str], size: int) -> None:
    text = "".join(messages)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    kind = REASONING_PARSERS.load("gpt-oss")
    parser = kind(prompt_is_open=False)
    scan = ThoughtScan(thought_texts(kind, prompt_is_open=False, may_call=False))
    split = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    parts = [part for piece in pieces for part in scan.feed(piece)] + scan.finish()
    assert "".join(part.text for part in parts) == text
    answer = "".join(part.text for part in parts if part.is_answer)
    # The mark behind a message goes with it; nobody stops at it.
    assert answer.replace("<|end|>", "") == "".join(each.content for each in split)
