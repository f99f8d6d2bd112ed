"""Schemas mean what JSON Schema says with either library; `jsonschema` is the oracle."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from docs.schema_cases import CASES, Case
from runtime.errors import InvalidRequest
from runtime.grammar.grammar_backend import GrammarError, num_words
from runtime.grammar.libraries import GrammarLibraries
from runtime.grammar.limits import check_grammar
from runtime.requests.sampling_params import GrammarSpec
from tests.support.fake_engine import EOS_ID, byte_tokenizer
from tests.support.grammar_backends import BACKENDS, needs_grammars
from tests.support.grammar_walk import InProcessCompiler, allowed

pytestmark = needs_grammars

MAX_BYTES = 100
NUM_WALKS = 6
IDS = [f"{place}-{case.keyword}" for place, case in enumerate(CASES)]


@pytest.fixture(scope="module", params=BACKENDS)
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A compiler with one library and no other."""
    folder = tmp_path_factory.mktemp("alone")
    return InProcessCompiler(request.param, folder, byte_tokenizer(), [EOS_ID], alone=True)


@pytest.fixture(scope="module", params=BACKENDS)
def first(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A compiler that asks one library first."""
    folder = tmp_path_factory.mktemp("first")
    return InProcessCompiler(request.param, folder, byte_tokenizer(), [EOS_ID])


def libraries_of(compiler: InProcessCompiler) -> tuple[str, ...]:
    assert isinstance(compiler.backend, GrammarLibraries)
    return compiler.backend.names


def oracle(schema: Any) -> Any:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return _VALIDATOR(schema, format_checker=checker)


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    # Classes are those of ECMA 262: for Python `\d` is a digit of any script, `\x1f` a blank.
    if isinstance(value, str) and not re.search(pattern, value, re.ASCII):
        yield jsonschema.ValidationError(f"not {pattern}")


_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"pattern": _pattern})


def spec_of(schema: Any) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(schema))


def spelled(value: Any) -> set[str]:
    """Ways to write a value: whatever is said is said in one of them."""
    return {
        json.dumps(value, ensure_ascii=is_ascii, separators=separators)
        for is_ascii in (False, True)
        for separators in (None, (",", ":"))
    }


def reordered(value: Any) -> Iterator[Any]:
    """A value with its properties in every order."""
    if isinstance(value, dict) and len(value) <= 3:
        for items in itertools.permutations(value.items()):
            yield dict(items)
    else:
        yield value


class TwiceNamedError(Exception):
    """A name stands twice in an object, which no library prevents: JSON has the last one count."""


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise TwiceNamedError
    return dict(pairs)


def walked(compiler: InProcessCompiler, compiled: Any, rng: random.Random) -> str | None:
    """An output of random bytes that the masks allow; `None` for one that does not end soon."""
    matcher, found = compiler.backend.start(compiled), bytearray()
    while len(found) < MAX_BYTES:
        choices = allowed(compiler.backend, matcher, compiler.tokenizer.vocab_size)
        ends = EOS_ID in choices
        choices = [each for each in choices if each < 256]
        if ends and (not choices or rng.random() < 0.3):
            assert matcher.accept(EOS_ID)
            assert matcher.is_terminated
            # As the detokenizer does with bytes that are no text.
            return found.decode(errors="replace")
        closing = [each for each in choices if each in b'"}],']
        shown = [each for each in choices if each not in b" \t\r\n"]
        if closing and rng.random() < 0.35:
            choices = closing
        elif shown and rng.random() < 0.8:
            choices = shown
        found.append(rng.choice(choices))
        assert matcher.accept(found[-1])
    return None


def check_walks(compiler: InProcessCompiler, payload: bytes, schema: Any, num_walks: int) -> int:
    """Whatever ends is valid; how many did."""
    validator, rng = oracle(schema), random.Random(num_walks)
    compiled, num_ended = compiler.backend.load(payload), 0
    for _ in range(num_walks):
        text = walked(compiler, compiled, rng)
        if text is None:
            continue
        num_ended += 1
        try:
            value = json.loads(text, object_pairs_hook=without_repeats)
        except TwiceNamedError:
            continue
        assert validator.is_valid(value), text
    return num_ended


def test_the_table_is_right() -> None:
    assert len(CASES) >= 120
    for case in CASES:
        validator = oracle(case.schema)
        for value in case.good:
            assert validator.is_valid(value), (case, value)
        for value in case.bad:
            # For some formats the oracle wants packages that are not there.
            assert not validator.is_valid(value) or "format" in case.schema, (case, value)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_library_says_what_is_valid_and_nothing_else(
    alone: InProcessCompiler, case: Case
) -> None:
    spec = spec_of(case.schema)
    (name,) = libraries_of(alone)
    if name not in case.by:
        assert refusal(alone, spec)
        return
    check_grammar(spec)
    payload = alone.backend.compile(spec)
    for value in case.good:
        assert any(alone.takes(payload, text) for text in spelled(value)), value
    for value in case.bad:
        for text in (text for each in reordered(value) for text in spelled(each)):
            assert not alone.takes(payload, text), text
    check_walks(alone, payload, case.schema, NUM_WALKS)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_what_one_cannot_the_other_gets(first: InProcessCompiler, case: Case) -> None:
    spec = spec_of(case.schema)
    if not case.by:
        # By name: of the keyword, or of what is wrong with it.
        assert case.keyword in refusal(first, spec)
        return
    if not set(case.by) & set(libraries_of(first)):
        pytest.skip("the library that can is not installed")
    check_grammar(spec)
    payload = first.backend.compile(spec)
    for value in case.good[:1]:
        assert any(first.takes(payload, text) for text in spelled(value)), value
    for value in case.bad[:1]:
        assert not any(first.takes(payload, text) for text in spelled(value)), value


@pytest.mark.skipif(len(BACKENDS) < 2, reason="needs both libraries")
def test_outputs_of_both_libraries_in_one_batch(first: InProcessCompiler) -> None:
    backend, vocab_size = first.backend, first.tokenizer.vocab_size
    schemas = [{"type": "integer", "multipleOf": 3}, {"const": 2**53 + 1}, {"type": "null"}]
    matchers = [backend.start(backend.load(backend.compile(spec_of(each)))) for each in schemas]
    assert len({each.library for each in matchers}) == 2
    words = np.empty((3, num_words(vocab_size)), dtype=np.int32)
    backend.fill(matchers, words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :256]
    found = ["".join(map(chr, np.flatnonzero(row))) for row in bits]
    assert found == ["-0123456789", "9", "n"]


def refusal(compiler: InProcessCompiler, spec: GrammarSpec) -> str:
    """Why a schema is refused, before it is compiled or then."""
    try:
        check_grammar(spec)
        compiler.backend.compile(spec)
    except (InvalidRequest, GrammarError) as error:
        return str(error)
    pytest.fail("it was not refused")
