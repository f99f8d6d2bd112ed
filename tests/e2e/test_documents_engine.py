"""Every code cell of the offline engine's documents, in order, one process per document.

Only the import and the model's name are changed. `offline_engine.cells` is the code of two
documents, which differ in language only.
"""

import re

import pytest

from headrace.demo import MODEL_PATH
from runtime.text.tokenizer import Tokenizer
from tests.support.notebook import run_document

# Up to four words, said twice in a row: what a stream printed with its overlaps looks like.
STAMMER = re.compile(r"(?:^|\s)(\S+(?:\s+\S+){0,3})\s+\1(?=[\s.,]|$)")
ANSWER = re.compile(
    r"^Prompt: (?P<prompt>[^\n]*)\nGenerated text: (?P<text>.*?)(?=^Prompt:|^=====|^\[cell|\Z)",
    re.MULTILINE | re.DOTALL,
)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("offline_engine", "script"),
        ("offline_engine", "notebook"),
        ("offline_engine_earlier", "script"),
    ],
)
def test_every_cell_runs_and_prints_sense(name: str, mode: str) -> None:
    if mode == "notebook":
        pytest.importorskip("nest_asyncio")
    output, errors = run_document(name, mode)
    assert not errors
    assert output.count("[cell ") == 6
    answers = [(m["prompt"], m["text"].strip()) for m in ANSWER.finditer(output)]
    assert len(answers) == 4 + 3 * 3
    tokenizer = Tokenizer.from_folder(MODEL_PATH)
    for prompt, text in answers:
        assert len(text) > 3, prompt
        assert not STAMMER.search(text), text
        # The default length: a text printed with its overlaps would be many times longer.
        assert len(tokenizer.encode(text)) <= 130
        if prompt.endswith("The capital of France is"):
            assert text.startswith("Paris"), text


def test_the_check_for_repeats_sees_them() -> None:
    assert STAMMER.search("Paris Paris. Paris. France Paris. France is")
    assert STAMMER.search("I am I am a baker")
    assert not STAMMER.search("Paris. France is in Europe. The currency of France is the euro.")
