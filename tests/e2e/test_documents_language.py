"""All code cells of the frontend language's document, in order, in one process.

Only the package, the models' names and the picture's address are changed. Until there are models
that see, the cell that asks about a picture shows the error that says so.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.support.notebook import DOCUMENTS, read_cells, run_document

NAME = "frontend_language"
TOOLS = ("calculator", "search engine")
ADDRESS = r"((25[0-5]|2[0-4]\d|[01]?\d\d?).){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)"
TEMPLATE = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def printed() -> dict[int, str]:
    """What each cell printed, by its number."""
    pytest.importorskip("requests")
    output, _ = run_document(NAME, "script")
    # A stream's last piece ends no line.
    parts = re.split(r"\[cell (\d+)\]\n", output)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_cell_runs(printed):
    assert list(printed) == list(range(1, len(read_cells(DOCUMENTS / f"{NAME}.cells")) + 1))
    assert printed[1].startswith("Server started on")
    silent = {number for number, text in printed.items() if not text.strip()}
    assert silent == {2, 3, 13, 15, 17}


def test_turns_and_tools(printed):
    assert printed[4].strip()
    assert len(printed[5].strip().splitlines()) >= 2
    assert printed[6].splitlines()[0] in TOOLS
    assert printed[7].strip()


def test_answers_in_a_given_form(printed):
    assert re.fullmatch(ADDRESS, printed[8].strip())
    character = json.loads(printed[9])
    assert character["house"] in ("Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff")
    assert character["wand"].keys() == {"wood", "core", "length"}


def test_a_batch_and_a_stream(printed):
    answers = re.findall(r"^Answer (\d): (.+)", printed[10], re.MULTILINE)
    assert [number for number, _ in answers] == ["1", "2", "3"]
    assert TEMPLATE in printed[11]
    assert "Paris" in printed[11].split(TEMPLATE)[1]
    assert "Paris" in printed[12]


def test_a_model_that_sees_nothing_says_so(printed):
    assert "image_data: this model takes text only" in printed[16]
