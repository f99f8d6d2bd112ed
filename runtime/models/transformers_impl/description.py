"""What a model of `transformers` is, in plain data: made where torch is, read where it is not.

Front-safe.
"""

from __future__ import annotations

import msgspec

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.checkpoint.model_spec import WeightSpec


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A model of `transformers`.

    Attributes:
        version: of `transformers`.
        weights: every tensor of the checkpoint as the model names it, with our layer for each.
        attention: of each layer.
        prefix: what checkpoints of the model without a head leave out of names, with a dot.
        renames: patterns of names in files, and what `transformers` makes of them.
        aliases: tensors that repeat another one: a tied head.
        ignored: patterns of tensors that files may have and the model does not need.
        num_idle: numbers of weights that are not read for a token.
        has_plan: whether the model says how ranks share it.
        splits: sizes that ranks must divide.
        as_they_are: kinds of modules that run as `transformers` has them, which is slower than a
            family here.
    """

    version: str
    vocab_size: int
    hidden_size: int
    context_len: int
    eos_token_ids: list[int]
    bos_token_id: int | None
    weights: list[WeightSpec]
    attention: list[AttentionSpec]
    prefix: str
    renames: list[tuple[str, str]]
    aliases: dict[str, str]
    ignored: list[str]
    num_idle: int
    has_plan: bool
    splits: list[tuple[int, str]]
    as_they_are: list[str]


class Answer(msgspec.Struct, frozen=True):
    """What the process that describes a model says: one of both."""

    description: Description | None = None
    error: str = ""


class Question(msgspec.Struct, frozen=True):
    """What it is asked: the class, and the values of `config.json` as JSON."""

    architecture: str
    values: msgspec.Raw
