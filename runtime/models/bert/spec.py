"""BERT's `config.json` and the names of its weights. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.checkpoint.config_keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, common_fields
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import Gives, LayerState, ModelSpec, NoState, WeightSpec
from runtime.checkpoint.rope_json import MAX_POSITIONS
from runtime.checkpoint.sentence_transformers import BlockActivation
from runtime.models.decoder.weight_map import linear_weights

ACTIVATIONS: dict[str, BlockActivation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Checkpoints may hold an unused pooler, heads for pretraining and, in old versions, position ids.
_UNUSED = re.compile(r"(pooler\.|cls\.|lm_head\.).*|embeddings\.position_ids")


@dataclass(frozen=True, kw_only=True)
class BertSpec(ModelSpec):
    """Sizes and other settings of a BERT encoder.

    Attributes:
        num_token_types: rows of the token type embedding. With two rows, the tokens of a pair's
            second text have the second type.
        first_position: row of the position embedding for a text's first token.
        prefix: prefix of the encoder's weight names in the checkpoint of a model with a head.
    """

    gives: Gives = "vectors"
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_token_types: int
    layer_norm_eps: float
    activation: BlockActivation
    first_position: int = 0
    prefix: str = "bert."

    @property
    def num_positions(self) -> int:
        """Rows of the position embedding."""
        return self.context_len + self.first_position

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`.

        Old checkpoints call a norm's weight and bias `gamma` and `beta`.
        """
        name = name.removeprefix(self.prefix)
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )

    def _list_weights(self) -> Sequence[WeightSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        weights = []
        for name, rows in (
            ("word_embeddings", self.vocab_size),
            ("position_embeddings", self.num_positions),
            ("token_type_embeddings", self.num_token_types),
        ):
            full = f"embeddings.{name}.weight"
            weights.append(WeightSpec(full, (rows, hidden), full))
        weights += layer_norm_weights("embeddings.LayerNorm", hidden)
        for layer_idx in range(self.num_layers):
            prefix = f"encoder.layer.{layer_idx}"
            attention = f"{prefix}.attention"
            for shard, name in (("q", "query"), ("k", "key"), ("v", "value")):
                source, target = f"{attention}.self.{name}", f"{attention}.qkv"
                weights += linear_weights(source, target, (hidden, hidden), shard, bias=True)
            for name, shape in (
                (f"{attention}.output.dense", (hidden, hidden)),
                (f"{prefix}.intermediate.dense", (inner, hidden)),
                (f"{prefix}.output.dense", (hidden, inner)),
            ):
                weights += linear_weights(name, name, shape, bias=True)
            weights += layer_norm_weights(f"{attention}.output.LayerNorm", hidden)
            weights += layer_norm_weights(f"{prefix}.output.LayerNorm", hidden)
        return weights

    @property
    def layer_states(self) -> Sequence[LayerState]:
        """Return one `NoState` per layer: an encoder keeps nothing between steps."""
        return (NoState(),) * self.num_layers

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed; see `ModelSpec`."""
        return _UNUSED.fullmatch(name) is not None

    def uneven_parts(self, tp_size: int, ep_size: int = 1) -> list[str]:  # noqa: ARG002  # no experts
        """Return the parts that ranks cannot share evenly; see `ModelSpec`."""
        return uneven(tp_size, self.num_heads, self.intermediate_size)


def uneven(tp_size: int, num_heads: int, intermediate_size: int) -> list[str]:
    """Return what `tp_size` ranks of an encoder cannot share evenly, such as `3 attention heads`.

    See `ModelSpec.uneven_parts`.
    """
    parts = ((num_heads, "attention heads"), (intermediate_size, "feed-forward rows"))
    return [f"{count} {what}" for count, what in parts if count % tp_size]


def read(config: Keys, generation: Keys) -> BertSpec:
    """Return the settings in BERT's `config.json`; errors are those of `read_bert`."""
    return read_bert(config, generation, prefix="bert.")


def read_bert(config: Keys, generation: Keys, *, prefix: str, first_position: int = 0) -> BertSpec:
    """Read the `config.json` of BERT or of a descendant.

    Args:
        config: the model's `config.json`.
        generation: the model's `generation_config.json`.
        prefix: prefix of the encoder's weight names in the checkpoint of a model with a head.
        first_position: row of the position embedding for a text's first token.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported; the
            message names the key.
    """
    common = common_fields(config, generation)
    num_heads = config.integer("num_attention_heads", MAX_HEADS)
    if common["hidden_size"] % num_heads:
        raise config.error("hidden_size", f"a multiple of {num_heads} attention heads")
    activation = config.values.get("hidden_act", "gelu")
    if activation not in ACTIVATIONS:
        raise config.error("hidden_act", f"one of {', '.join(ACTIVATIONS)}")
    if config.values.get("position_embedding_type", "absolute") != "absolute":
        raise config.error("position_embedding_type", "'absolute'")
    for key in ("is_decoder", "add_cross_attention"):
        if config.flag(key, False):
            raise config.error(key, "false: BERT is served as an encoder")
    return BertSpec(
        **common,
        context_len=config.integer(
            "max_position_embeddings", MAX_POSITIONS, 512, low=first_position + 1
        )
        - first_position,
        intermediate_size=config.integer("intermediate_size", MAX_WIDTH),
        num_layers=config.integer("num_hidden_layers", MAX_LAYERS),
        num_heads=num_heads,
        num_token_types=config.integer("type_vocab_size", MAX_WIDTH, 2),
        layer_norm_eps=config.number("layer_norm_eps", 0.0, 1.0, 1e-12),
        activation=ACTIVATIONS[activation],
        first_position=first_position,
        prefix=prefix,
    )


def layer_norm_weights(name: str, size: int) -> list[WeightSpec]:
    """Return the specs of a layer norm's weight and bias, `[size]` each."""
    return [
        WeightSpec(f"{name}.weight", (size,), f"{name}.weight", kind="norm"),
        WeightSpec(f"{name}.bias", (size,), f"{name}.bias", kind="bias"),
    ]
