"""All code cells of the native API's document, in order.

Only the package, the host and the models' names are changed.
"""

import ast
import re

import pytest

from headrace.demo import MODEL_PATH
from runtime.text.tokenizer import Tokenizer
from tests.support.notebook import DOCUMENTS, read_cells, run_document

NAME = "native_api"


@pytest.fixture(scope="module")
def ran() -> tuple[str, str]:
    """What all cells printed, and what the servers wrote meanwhile."""
    pytest.importorskip("requests")
    return run_document(NAME, "script")


@pytest.fixture(scope="module")
def printed(ran: tuple[str, str]) -> dict[int, str]:
    """What each cell printed, by its number."""
    output, _ = ran
    parts = re.split(r"^\[cell (\d+)\]\n", output, flags=re.MULTILINE)
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def test_every_cell_runs(printed):
    assert list(printed) == list(range(1, len(read_cells(DOCUMENTS / f"{NAME}.cells")) + 1))


def test_generate(printed):
    answer = ast.literal_eval(printed[2].strip())
    # Sampled at temperature 1, with the seed that the cells start the server with.
    assert "Paris" in answer["text"]
    assert answer["meta_info"]["finish_reason"]["type"] in ("stop", "length")


def test_information_and_control(printed, ran):
    # The document's own assertions hold: a cell that fails ends the process.
    told = ast.literal_eval(printed[3].strip())
    # The server says that the route has a newer name.
    assert "deprecated" in ran[1]
    assert told["model_path"] == str(MODEL_PATH)
    assert '"max_total_num_tokens":' in printed[4]
    assert printed[5].strip() == printed[6].strip() == ""
    assert "flushed" in printed[7]


def test_weights_are_updated(printed):
    assert '"success":true' in printed[8].replace(" ", "")
    assert "repository not found" in printed[9]


def test_models_that_give_vectors_and_scores(printed):
    vector = ast.literal_eval(printed[12].split("(first 10): ")[1].strip())
    assert len(vector) == 10
    assert all(isinstance(number, float) for number in vector)
    scores = re.findall(r"Score: (-?[\d.]+) - Document: '(hi|The giant panda .*)'", printed[15])
    assert len(scores) == 2
    assert float(scores[0][0]) >= float(scores[1][0])
    assert len(re.findall(r"^reward: -?[\d.]+", printed[18], re.MULTILINE)) == 2


def test_expert_use_is_recorded(printed):
    assert printed[21].count("<Response [200]>") == 3


def test_the_round_trip(printed):
    text = "SGLang provides efficient tokenization endpoints."
    ids = Tokenizer.from_folder(MODEL_PATH).encode(text, add_special_tokens=False)
    assert f"Tokenized Output (IDs):\n{ids}" in printed[24]
    assert f"Token Count: {len(ids)}" in printed[24]
    assert "Round Trip Successful" in printed[24]
