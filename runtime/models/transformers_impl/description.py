"""The description of a model of `transformers`, made by a process with torch for one without.

Front-safe.
"""

from __future__ import annotations

import msgspec

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.checkpoint.model_spec import WeightSpec


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A model of `transformers`.

    Attributes:
        version: version of `transformers`.
        weights: every tensor of the checkpoint as the model names it, with our layer for each.
        attention: the attention of each layer.
        prefix: beginning of names, with a dot, that is missing in checkpoints without a head.
        renames: pairs of a pattern of names in files and the replacement by `transformers`.
        aliases: names of tensors that repeat another one, such as a tied head, and of that one.
        ignored: patterns of tensors that files may have and the model does not need.
        num_idle: how many elements of all weights a token does not read.
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
    """The output of the process that describes a model: either a description or an error."""

    description: Description | None = None
    error: str = ""


class Question(msgspec.Struct, frozen=True):
    """The input of that process: the model's class, and the content of `config.json`."""

    architecture: str
    values: msgspec.Raw
