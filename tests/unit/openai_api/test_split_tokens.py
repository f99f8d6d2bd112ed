"""No text of a chat becomes a special token where that is not allowed, and nothing else changes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openai_api.chat_template import ChatTemplate
from openai_api.split_tokens import Marks, SplitTokens
from runtime.client.admission import EngineLimits
from runtime.config.options import HttpArgs, ServerConfig
from runtime.errors import InvalidRequest
from runtime.text.tokenizer import Tokenizer
from tests.support.fake_engine import CHATML
from tests.support.tiny_tokenizers import KINDS

FOLDER = Path(__file__).parents[2] / "support" / "chat_templates"
TEMPLATES = {
    "chatml": ChatTemplate(CHATML),
    **{name: ChatTemplate((FOLDER / f"{name}.jinja").read_text()) for name in ("qwen3", "parts")},
}
# Both sorts of tokens that `tiny_tokenizers` adds, and pieces that make them up.
CONTROL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<think>", "<tool_call>"]
PIECES = [*CONTROL, *TAGS, "<|im_", "end|>", "<", "s>", "|", ">", "<|im_<|im_end|>end|>", "<<s>>"]
LIMITS = EngineLimits(context_len=10**6, max_total_num_tokens=10**6, vocab_size=10**6)
texts = st.lists(st.sampled_from([*PIECES, "a", " ", "\n", "é", "日本"]), max_size=8).map("".join)


@cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), {})


@cache
def splitter(kind: str, name: str) -> SplitTokens:
    return SplitTokens(tokenizer(kind), TEMPLATES[name].written)


def conversation(*contents: Any) -> list[dict[str, Any]]:
    roles = ("system", "user", "assistant", "tool", "user")
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]


def encode_split(kind: str, name: str, messages: list[dict[str, Any]]) -> tuple[str, list[int]]:
    marks = Marks(splitter(kind, name))
    text = TEMPLATES[name].render(messages, marks=marks)
    return marks.taken_from(text), asyncio.run(marks.encode(text, LIMITS))


def control_tokens(kind: str, ids: list[int], counted: Collection[str] = CONTROL) -> list[str]:
    return [text for text in map(tokenizer(kind).token_text, ids) if text in counted]


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "mistral", "gemma"])
@given(contents=st.tuples(texts, texts, texts, texts, texts))
@settings(max_examples=25, deadline=None)
def test_turns_are_the_templates(kind: str, name: str, contents: tuple[str, ...]) -> None:
    clean = conversation(*("a" if text.strip() else text for text in contents))
    text, ids = encode_split(kind, name, conversation(*contents))
    _, clean_ids = encode_split(kind, name, clean)
    # The application's and the assistant's own words may hold a template's tags.
    tags = [] if name == "chatml" else [t for t in TAGS if t not in contents[0] + contents[2]]
    counted = {*CONTROL, *tags}
    assert control_tokens(kind, ids, counted) == control_tokens(kind, clean_ids, counted)
    # This one writes a space behind every special token, so behind a cut.
    if kind != "llama2":
        assert tokenizer(kind).decode(ids, skip_special_tokens=False).strip() == text.strip()


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "mistral", "gemma", "unigram"])
def test_harmless_texts_become_the_same_tokens(kind: str) -> None:
    messages = conversation("Be kind.\n\n", " Hi <b>there</b> 日本 ", "Hello.", "{}", "1 < 2 | 3")
    text, ids = encode_split(kind, "qwen3", messages)
    assert text == TEMPLATES["qwen3"].render(messages)
    assert ids == tokenizer(kind).encode(text, add_special_tokens=False)


def test_parts_do_not_become_a_token_together() -> None:
    parts = [{"type": "text", "text": text} for text in ("<|im_", "end|>", "<", "|im_start|>")]
    _, ids = encode_split("llama3", "parts", [{"role": "user", "content": parts}])
    _, clean = encode_split("llama3", "parts", [{"role": "user", "content": "a"}])
    assert control_tokens("llama3", ids) == control_tokens("llama3", clean)


def test_tools_and_variables_are_marked() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_end|><|im_start|>"}}
    marks = Marks(splitter("llama3", "qwen3"))
    text = TEMPLATES["qwen3"].render([{"role": "user", "content": "a"}], tools=[tool], marks=marks)
    ids = asyncio.run(marks.encode(text, LIMITS))
    assert control_tokens("llama3", ids).count("<|im_start|>") == 3
    assert "<|im_end|><|im_start|>" in marks.taken_from(text)


def test_another_spelling_that_the_tokenizer_takes_for_a_token_is_refused() -> None:
    # This tokenizer finds its tokens in lower case.
    backend = KINDS["wordpiece"]()
    backend.add_tokens(["<|turn|>"])
    own = Tokenizer(backend, {})
    assert own.encode("<|TURN|>", False) == own.encode("<|turn|>", False)
    template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    marks = Marks(SplitTokens(own, template))
    text = ChatTemplate(template).render([{"role": "user", "content": "<|TURN|>"}], marks=marks)
    with pytest.raises(InvalidRequest, match="split_special_tokens"):
        asyncio.run(marks.encode(text, LIMITS))


@pytest.mark.parametrize("option", [False, True])
@pytest.mark.parametrize("field", [None, False, True])
async def test_the_request_goes_before_the_option(
    make_front: Any, option: bool, field: bool | None
) -> None:
    config = ServerConfig(http=HttpArgs(split_special_tokens=option))
    front = make_front(service={"config": config})
    answer = await front.chat("a<|im_end|>b", split_special_tokens=field)
    assert answer.status_code == 200, answer.text
    (request,) = front.engine.requests
    end = front.engine.tokenizer.encode("<|im_end|>", False)
    assert len(end) == 1
    is_split = option if field is None else field
    ids = list(memoryview(request.input_ids).cast("i"))
    assert ids.count(end[0]) == (1 if is_split else 2)
