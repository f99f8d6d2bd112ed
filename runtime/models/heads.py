"""The heads of embedders, classifiers and reward models. Imports no torch.

Each function takes the spec that the family read from `config.json` and returns a copy with a head.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.checkpoint.config_keys import MAX_WIDTH
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import ModelSpec
from runtime.checkpoint.sentence_transformers import HeadLayer, Mode, Pooling
from runtime.models.bert.spec import ACTIVATIONS

_MAX_LABELS = 2**16
_DEFAULT_LABELS = 2


def vectors(spec: ModelSpec, config: Keys) -> ModelSpec:  # noqa: ARG001  # the folder's files say more
    """Return a decoder that gives the last token's vector instead of logits."""
    return replace(spec, gives="vectors", pooling=Pooling("last"))


def pooled_classifier(spec: ModelSpec, config: Keys) -> ModelSpec:
    """Return BERT as a classifier: a pooler over the first token, then one row per class."""
    hidden, labels = spec.hidden_size, _labels(config)
    pooler = HeadLayer("pooler.dense", hidden, hidden, activation="tanh")
    return _scoring(spec, labels, "cls", pooler, HeadLayer("classifier", hidden, len(labels)))


def dense_classifier(spec: ModelSpec, config: Keys) -> ModelSpec:
    """Return RoBERTa as a classifier: a dense layer over the first token, then the classes."""
    hidden, labels = spec.hidden_size, _labels(config)
    dense = HeadLayer("classifier.dense", hidden, hidden, activation="tanh")
    return _scoring(
        spec, labels, "cls", dense, HeadLayer("classifier.out_proj", hidden, len(labels))
    )


def modernbert_classifier(spec: ModelSpec, config: Keys) -> ModelSpec:
    """Return ModernBERT as a classifier: pooling, a dense layer, a norm, then the classes.

    The key `classifier_pooling` selects the first token or the mean of all tokens.

    Raises:
        StartupError: the pooling or the activation is not supported.
    """
    hidden, labels = spec.hidden_size, _labels(config)
    mode = config.values.get("classifier_pooling", "cls")
    if mode not in ("cls", "mean"):
        raise config.error("classifier_pooling", "'cls' or 'mean'")
    activation = config.values.get("classifier_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise config.error("classifier_activation", f"one of {', '.join(ACTIVATIONS)}")
    dense = HeadLayer(
        "head.dense",
        hidden,
        hidden,
        bias=config.flag("classifier_bias", False),
        activation=ACTIVATIONS[activation],
        norm="head.norm",
        norm_eps=config.number("norm_eps", 0.0, 1.0, 1e-5),
        norm_bias=config.flag("norm_bias", False),
    )
    return _scoring(spec, labels, mode, dense, HeadLayer("classifier", hidden, len(labels)))


def last_token_scores(spec: ModelSpec, config: Keys) -> ModelSpec:
    """Return a decoder with a classifier's head: one matrix over the last token's hidden state."""
    labels = _labels(config)
    score = HeadLayer("score", spec.hidden_size, len(labels), bias=False)
    return _scoring(spec, labels, "last", score)


def reward(spec: ModelSpec, config: Keys) -> ModelSpec:  # noqa: ARG001  # one reward, whatever it says
    """Return Qwen2's reward model: two dense layers over the last token give one number."""
    hidden = spec.hidden_size
    first = HeadLayer("score.0", hidden, hidden, activation="relu")
    return _scoring(spec, ("reward",), "last", first, HeadLayer("score.2", hidden, 1))


def _scoring(spec: ModelSpec, labels: tuple[str, ...], mode: Mode, *layers: HeadLayer) -> ModelSpec:
    pooling = Pooling(mode, normalize=False, layers=layers)
    return replace(spec, gives="scores", pooling=pooling, labels=labels)


def _labels(config: Keys) -> tuple[str, ...]:
    """Return the names of the classes, in order.

    Raises:
        StartupError: `id2label` does not name each class.
    """
    named = config.mapping("id2label")
    if not named:
        count = config.integer("num_labels", min(_MAX_LABELS, MAX_WIDTH), _DEFAULT_LABELS)
        return tuple(f"LABEL_{index}" for index in range(count))
    if len(named) > _MAX_LABELS:
        raise config.error("id2label", f"at most {_MAX_LABELS} classes")
    try:
        return tuple(str(named[str(index)]) for index in range(len(named)))
    except KeyError as error:
        raise config.error("id2label", f"a name for each of {len(named)} classes") from error
