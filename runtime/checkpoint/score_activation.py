"""What a cross-encoder's folder puts behind its score, as sentence-transformers reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from runtime.checkpoint.json_file import read_json_object

ScoreActivation = Literal["sigmoid", "identity"]

# Modules of torch by their names; sentence-transformers runs others, too, which no model is known
# to have.
_KNOWN: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
FILE = "config_sentence_transformers.json"


def read_score_activation(folder: Path, config: dict[str, Any]) -> ScoreActivation:
    """The function that makes a relevance of a model's one score; a sigmoid where none is named.

    Args:
        folder: of the model; or a file that stands for its `config.json`.
        config: what that holds.

    Raises:
        StartupError: a file that is no JSON object; one line.
    """
    path = folder / FILE
    named: list[Any] = []
    # Without modules a folder is older than this file's word on it.
    if (folder / "modules.json").is_file() and path.is_file():
        written = read_json_object(path)
        if written.get("model_type") == "CrossEncoder":
            named.append(written.get("activation_fn"))
    nested = config.get("sentence_transformers")
    if isinstance(nested, dict):
        named.append(nested.get("activation_fn"))
    # Before version 4.
    named.append(config.get("sbert_ce_default_activation_function"))
    for each in named:
        if isinstance(each, str):
            return _KNOWN.get(each.rpartition(".")[2], "sigmoid")
    return "sigmoid"
