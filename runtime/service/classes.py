"""Turns a classifier's scores into class probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.checkpoint.model_spec import ModelSpec
from runtime.errors import InvalidRequest
from runtime.service.text_embeddings import Embedding


@dataclass(frozen=True)
class Classified:
    """The classification of one text.

    Attributes:
        label: name of the most probable class, from `config.json`.
        probabilities: probability of each class, in the order of the model's labels.
    """

    label: str
    probabilities: list[float]


def require_scores(model: ModelSpec, path: str) -> None:
    """Refuse a request that needs a classifier unless the model is one.

    Args:
        model: the loaded model.
        path: the request's route, for the message.

    Raises:
        InvalidRequest: the model does not give scores.
    """
    if model.gives != "scores":
        gives = "generates text" if model.gives == "tokens" else "gives vectors"
        raise InvalidRequest(
            f"{path} needs a model that scores texts; this server's ({model.architecture}) {gives}."
        )


def classify(model: ModelSpec, found: Embedding) -> Classified:
    """Turn a text's scores into probabilities: softmax if classes are exclusive, else sigmoid.

    As in the text classification pipeline of `transformers`, sigmoid is used for a model with one
    class, and for one that was trained to give a text several classes at once.
    """
    numbers = found.numbers
    is_each = len(numbers) == 1 or model.raw.get("problem_type") == "multi_label_classification"
    if is_each:
        probabilities = [1.0 / (1.0 + math.exp(-max(number, -700.0))) for number in numbers]
    else:
        most = max(numbers)
        parts = [math.exp(number - most) for number in numbers]
        total = sum(parts)
        probabilities = [part / total for part in parts]
    best = max(range(len(numbers)), key=numbers.__getitem__)
    return Classified(model.labels[best], probabilities)
