"""Reads which function a cross-encoder applies to its score, as sentence-transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from runtime.checkpoint.json_file import read_json_object

ScoreActivation = Literal["sigmoid", "identity"]

# Activations by the class names of torch's modules. sentence-transformers supports others too, but
# no known model has one.
_KNOWN: dict[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Identity": "identity"}
FILE = "config_sentence_transformers.json"


def read_score_activation(folder: Path, config: dict[str, Any]) -> ScoreActivation:
    """Return the function that turns a model's score into a relevance; by default a sigmoid.

    Args:
        folder: folder of the model, or a file that takes the place of its `config.json`.
        config: contents of `config.json`.

    Raises:
        StartupError: a file is not a JSON object; the message has one line.
    """
    path = folder / FILE
    named: list[Any] = []
    # A folder without `modules.json` is older than the key `activation_fn`, so the key is not read.
    if (folder / "modules.json").is_file() and path.is_file():
        written = read_json_object(path)
        if written.get("model_type") == "CrossEncoder":
            named.append(written.get("activation_fn"))
    nested = config.get("sentence_transformers")
    if isinstance(nested, dict):
        named.append(nested.get("activation_fn"))
    # Versions before 4 write this key.
    named.append(config.get("sbert_ce_default_activation_function"))
    for each in named:
        if isinstance(each, str):
            return _KNOWN.get(each.rpartition(".")[2], "sigmoid")
    return "sigmoid"
