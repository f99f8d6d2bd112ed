"""Grammars treat added tokens as text, except special ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.grammar.grammar_backend import GRAMMAR_BACKENDS, GrammarBackend
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import allowed
from tests.support.tiny_tokenizers import KINDS, write_folder

pytestmark = needs_grammars

KINDS_OF_BYTES = ("gpt2", "llama3", "llama2", "mistral", "gemma")
EOS = "</s>"


@pytest.fixture(params=BACKENDS)
def make(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Callable[[str], tuple[GrammarBackend[Any], Tokenizer]]:
    def make(kind: str) -> tuple[GrammarBackend[Any], Tokenizer]:
        folder = write_folder(tmp_path, KINDS[kind](), eos_token=EOS)
        tokenizer = Tokenizer.from_folder(folder)
        eos = [tokenizer.backend.token_to_id(EOS)]
        backend = GRAMMAR_BACKENDS.load(request.param)(folder, tokenizer.vocab_size, eos)
        return backend, tokenizer

    return make


@pytest.mark.parametrize("kind", KINDS_OF_BYTES)
def test_an_output_through_added_tokens(make: Any, kind: str) -> None:
    backend, tokenizer = make(kind)
    text = "a<tool_call>b <think>c <|im_end|>"
    pattern = text.replace("|", r"\|")
    compiled = backend.load(backend.compile(GrammarSpec("regex", pattern)))
    rng = np.random.default_rng(0)
    seen = set()
    for _ in range(8):
        matcher, ids = backend.start(compiled), []
        while not matcher.is_terminated:
            choices = allowed(backend, matcher, tokenizer.vocab_size)
            assert choices, tokenizer.decode(ids, skip_special_tokens=False)
            ids.append(int(rng.choice(choices)))
            assert matcher.accept(ids[-1]), tokenizer.decode(ids, skip_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True).strip() == text
        seen.update(ids)
    # Llama 2's tokenizer puts a space behind added tokens: forced text has none of them.
    assert tokenizer.backend.token_to_id("<tool_call>") in seen or kind == "llama2"
    assert tokenizer.backend.token_to_id("<|im_end|>") not in seen


def test_added_tokens_may_come_where_text_may(make: Any) -> None:
    backend, tokenizer = make("llama3")
    compiled = backend.load(backend.compile(GrammarSpec("regex", r"[\s\S]*")))
    choices = allowed(backend, backend.start(compiled), tokenizer.vocab_size)
    ids = {text: tokenizer.backend.token_to_id(text) for text in ("<think>", "<|im_start|>")}
    assert ids["<think>"] in choices
    assert ids["<|im_start|>"] not in choices


@pytest.mark.parametrize("kind", KINDS_OF_BYTES)
def test_special_tokens_are_text_where_an_output_shows_them(make: Any, kind: str) -> None:
    backend, tokenizer = make(kind)
    mark, end = (tokenizer.backend.token_to_id(text) for text in ("<|im_start|>", EOS))
    for shows_special in (False, True):
        for pattern in (r"[\s\S]*", r"(<\|im_start\|>|y)x"):
            spec = GrammarSpec("regex", pattern, shows_special)
            matcher = backend.start(backend.load(backend.compile(spec)))
            choices = allowed(backend, matcher, tokenizer.vocab_size)
            assert (mark in choices) == shows_special, pattern
            # What ends a text is never text.
            assert (end in choices) == (pattern == r"[\s\S]*")
            if shows_special:
                assert matcher.accept(mark)


@pytest.mark.skipif("llguidance" not in BACKENDS, reason="its own language")
def test_a_grammar_may_name_added_tokens(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, KINDS["llama3"](), eos_token=EOS)
    tokenizer = Tokenizer.from_folder(folder)
    # The logits may be wider than the tokenizer: what is beyond has no text.
    vocab_size = tokenizer.vocab_size + 40
    eos = [tokenizer.backend.token_to_id(EOS)]
    backend = GRAMMAR_BACKENDS.load("llguidance")(folder, vocab_size, eos)
    lark = '%llguidance {}\nstart: <think> "<think>" /<t[h]ink>/ // <think>\n'
    matcher = backend.start(backend.load(backend.compile(GrammarSpec("ebnf", lark))))
    ids: list[int] = []
    first = None
    while not matcher.is_terminated:
        choices = allowed(backend, matcher, vocab_size)
        first = first or choices
        # The text may be spelled, the token may not.
        ids.append(choices[0])
        assert matcher.accept(ids[-1])
    assert first == [tokenizer.backend.token_to_id("<think>")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>" * 3
    unused = GrammarSpec("regex", rf"<\[{tokenizer.vocab_size + 1}\]>x")
    matcher = backend.start(backend.load(backend.compile(unused)))
    while not matcher.is_terminated:
        choices = allowed(backend, matcher, vocab_size)
        assert max(choices) < tokenizer.vocab_size
        assert matcher.accept(choices[0])
