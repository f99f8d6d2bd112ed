"""Blanks are bounded between two tokens of JSON, but not in other places."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from headrace.demo import MODEL_PATH
from runtime.grammar.blanks import MAX_BLANKS, BlankTokens
from runtime.grammar.grammar_backend import GRAMMAR_BACKENDS, num_words
from runtime.models.registry import read_model_spec
from runtime.requests.sampling_params import GrammarSpec
from runtime.text.tokenizer import Tokenizer

BACKENDS = [name for name in ("xgrammar", "llguidance") if find_spec(name) is not None]
FOLDER = Path(MODEL_PATH)


class Output:
    """An output of one grammar, token by token."""

    def __init__(self, name: str, spec: GrammarSpec, **options: float) -> None:
        config = read_model_spec(FOLDER)
        eos = list(config.eos_token_ids)
        self.backend = GRAMMAR_BACKENDS.load(name)(FOLDER, config.vocab_size, eos, **options)
        self.tokenizer = Tokenizer.from_folder(FOLDER)
        self.matcher = self.backend.start(self.backend.load(self.backend.compile(spec)))
        self.words = np.zeros((1, num_words(config.vocab_size)), dtype=np.int32)

    def takes(self, text: str) -> bool:
        """Whether the tokens of `text` may come next, as the masks say; then they have come."""
        for token_id in self.tokenizer.encode(text, add_special_tokens=False):
            self.backend.fill([self.matcher], self.words)
            if not self.words.view(np.uint32)[0, token_id // 32] >> token_id % 32 & 1:
                return False
            assert self.matcher.accept(token_id)
        return True


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("is_slow", [False, True])
def test_runs_between_tokens_end(backend, is_slow):
    # The form in which a grammar travels that took long to compile.
    options = {"compile_again_s": 0.0} if is_slow and backend == "xgrammar" else {}
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 2}'
    output = Output(backend, GrammarSpec("json_schema", schema), **options)
    for start in ("[", "7", ","):
        assert output.takes(start)
        run = 0
        while output.takes("\n"):
            run += 1
        assert run == MAX_BLANKS
    assert output.takes("8]")


def test_text_is_not_bounded(backend):
    output = Output(backend, GrammarSpec("json_schema", '{"type": "array"}'))
    assert output.takes('["a')
    for _ in range(3 * MAX_BLANKS):
        assert output.takes(" ")
    assert output.takes('b"')
    output = Output(backend, GrammarSpec("regex", "a[\\n]*b"))
    assert output.takes("a" + "\n" * 3 * MAX_BLANKS + "b")


def test_tokens_of_many_blanks():
    vocab = [b"", b"\n", b" " * 20, b" " * 40, b"   x", b"]\n", b"a"]
    tokens = BlankTokens(vocab)
    assert tokens.free_run == 0
    assert [tokens.run_after(5, token_id) for token_id in range(7)] == [0, 6, 25, 45, 0, 1, 0]

    def left(allowed: list[int], run: int) -> list[int]:
        mask = np.array([sum(1 << token_id for token_id in allowed)], dtype=np.int32)
        tokens.bound(mask, run)
        return [token_id for token_id in range(7) if mask[0] >> token_id & 1]

    assert left([1, 2, 3, 4, 5], 1) == [1, 2, 4, 5]
    assert left([1, 2, 3, 4, 5], 13) == [1, 4, 5]
    assert left([1, 2, 3, 4, 5], 30) == [1, 5]
    assert left([1, 2, 3, 4, 5], 32) == [5]
    # Inside a string, and where nothing else may come.
    assert left([2, 3, 6], 32) == [2, 3, 6]
    assert left([1, 2], 32) == [1, 2]
