"""A compiled grammar works in the worker in every form in which it is sent."""

import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from headrace.demo import MODEL_PATH
from runtime.grammar.cache import loaded_size
from runtime.grammar.grammar_backend import GRAMMAR_BACKENDS, GrammarError, num_words
from runtime.models.registry import read_model_spec
from runtime.requests.sampling_params import GrammarSpec

BACKENDS = [name for name in ("xgrammar", "llguidance") if find_spec(name) is not None]
SPECS = [
    GrammarSpec("json_schema", '{"type": "string", "maxLength": 3}'),
    GrammarSpec("regex", "[0-9]{2}"),
    GrammarSpec("ebnf", 'root ::= "a" | "b"'),
]


def make(name, **options):
    folder = Path(MODEL_PATH)
    config = read_model_spec(folder)
    eos = list(config.eos_token_ids)
    made = GRAMMAR_BACKENDS.load(name)(folder, config.vocab_size, eos, **options)
    return made, config.vocab_size


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_both_forms_are_followed_alike(name, spec):
    again = {"compile_again_s": math.inf} if name == "xgrammar" else {}
    backend, vocab_size = make(name, **again)
    payloads = [backend.compile(spec)]
    if name == "xgrammar":
        payloads.append(make(name, compile_again_s=0.0)[0].compile(spec))
        assert len(payloads[1]) > len(payloads[0])
    other, _ = make(name)
    masks = []
    for payload in payloads:
        assert loaded_size(payload) >= 64 * 1024
        words = np.zeros((1, num_words(vocab_size)), dtype=np.int32)
        other.fill([other.start(other.load(payload))], words)
        assert words.any()
        masks.append(words)
    assert all((mask == masks[0]).all() for mask in masks)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("payload", [b"", b"{", bytes(8), bytes(8) + b"c{", bytes(8) + b"w\xff"])
def test_what_is_no_grammar_is_refused(name, payload):
    backend, _ = make(name)
    with pytest.raises(GrammarError):
        backend.start(backend.load(payload))
