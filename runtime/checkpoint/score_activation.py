"""The function that a cross-encoder applies to its score, as sentence-transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from runtime.checkpoint.json_file import read_json_object

ScoreActivation = Literal["sigmoid", "identity"]

# torch's modules by name; sentence-transformers runs others, too, but no known model has one.
_KNOWN: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
FILE = "config_sentence_transformers.json"


def read_score_activation(folder: Path, config: dict[str, Any]) -> ScoreActivation:
    """Return the function that turns a model's score into a relevance; a sigmoid by default.

    Args:
        folder: folder of the model, or a file that replaces its `config.json`.
        config: contents of `config.json`.

    Raises:
        StartupError: a file is not a JSON object; the message is one line.
    """
    path = folder / FILE
    named: list[Any] = []
    # A folder without modules is older than this key of the file.
    if (folder / "modules.json").is_file() and path.is_file():
        written = read_json_object(path)
        if written.get("model_type") == "CrossEncoder":
            named.append(written.get("activation_fn"))
    nested = config.get("sentence_transformers")
    if isinstance(nested, dict):
        named.append(nested.get("activation_fn"))
    # As written before version 4.
    named.append(config.get("sbert_ce_default_activation_function"))
    for each in named:
        if isinstance(each, str):
            return _KNOWN.get(each.rpartition(".")[2], "sigmoid")
    return "sigmoid"
