"""The description of a `transformers` model, made in a process with torch for the front process.

Imports no torch.
"""

from __future__ import annotations

import msgspec

from runtime.checkpoint.attention_spec import AttentionSpec
from runtime.checkpoint.model_spec import WeightSpec


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a model of `transformers`.

    Attributes:
        version: version of `transformers`.
        weights: every tensor of the checkpoint under the model's name for it, with the layer of
            ours that it fills.
        attention: the attention of each layer.
        prefix: beginning of names, with a dot, that checkpoints without a head lack.
        renames: pairs of a pattern of names in files and its replacement in `transformers`.
        aliases: the name of the repeated tensor, for each tensor that only repeats another, such as
            a tied head.
        ignored: patterns of names of tensors that the model does not need, although files may have
            them.
        num_idle: number of elements of all weights that a token does not use.
        has_plan: whether the model has a plan for tensor parallelism.
        splits: sizes that the number of ranks must divide, each with its description.
        as_they_are: kinds of modules that run the code of `transformers`, which is slower than
            ours.
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
    """The input of the process that describes a model: its class and its `config.json`."""

    architecture: str
    values: msgspec.Raw
