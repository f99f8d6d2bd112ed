"""ModernBERT's `config.json` and the names of its weights. Imports no torch.

Source: arXiv 2412.13663.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.checkpoint.config_keys import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, common_fields
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import (
    Gives,
    LayerState,
    ModelSpec,
    NoState,
    WeightKind,
    WeightSpec,
)
from runtime.checkpoint.rope_json import MAX_POSITIONS, RopeConfig, read_rope
from runtime.checkpoint.sentence_transformers import BlockActivation
from runtime.models.bert.spec import ACTIVATIONS, uneven
from runtime.models.decoder.spec import read_layer_types
from runtime.models.decoder.weight_map import linear_weights

_GLOBAL_THETA, _LOCAL_THETA = 160_000.0, 10_000.0


@dataclass(frozen=True, kw_only=True)
class ModernBertSpec(ModelSpec):
    """The sizes and other settings of a ModernBERT encoder.

    Attributes:
        windowed_layers: indices of the layers whose tokens attend only to nearby tokens.
        window: number of tokens that a token attends to on each side in these layers.
        rope, windowed_rope: rotary embedding of the other layers, and of the windowed layers.
        norm_bias, attention_bias, mlp_bias: whether norms, attention and MLP have biases.
    """

    gives: Gives = "vectors"
    intermediate_size: int
    num_layers: int
    num_heads: int
    norm_eps: float
    activation: BlockActivation
    windowed_layers: frozenset[int]
    window: int
    rope: RopeConfig
    windowed_rope: RopeConfig
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`."""
        return name.removeprefix("model.")

    def _list_weights(self) -> Sequence[WeightSpec]:
        hidden, inner = self.hidden_size, self.intermediate_size
        embedding = "embeddings.tok_embeddings.weight"
        weights = [WeightSpec(embedding, (self.vocab_size, hidden), embedding)]
        weights += self._norm("embeddings.norm")
        for layer_idx in range(self.num_layers):
            prefix = f"layers.{layer_idx}"
            # The first layer needs no norm before attention: the embeddings are normed already.
            if layer_idx:
                weights += self._norm(f"{prefix}.attn_norm")
            weights += self._norm(f"{prefix}.mlp_norm")
            for name, shape, bias in (
                ("attn.Wqkv", (3 * hidden, hidden), self.attention_bias),
                ("attn.Wo", (hidden, hidden), self.attention_bias),
                ("mlp.Wi", (2 * inner, hidden), self.mlp_bias),
                ("mlp.Wo", (hidden, inner), self.mlp_bias),
            ):
                full = f"{prefix}.{name}"
                weights += linear_weights(full, full, shape, bias=bias)
        return weights + self._norm("final_norm")

    def _norm(self, name: str) -> list[WeightSpec]:
        kinds: tuple[tuple[str, WeightKind], ...] = (("weight", "norm"), ("bias", "bias"))
        return [
            WeightSpec(f"{name}.{part}", (self.hidden_size,), f"{name}.{part}", kind=kind)
            for part, kind in (kinds if self.norm_bias else kinds[:1])
        ]

    @property
    def layer_states(self) -> Sequence[LayerState]:
        """Return one `NoState` per layer: an encoder keeps nothing between steps."""
        return (NoState(),) * self.num_layers

    def is_ignored(self, name: str) -> bool:
        """Whether `name` is a weight of the head for pretraining, which is not used.

        See `ModelSpec`.
        """
        return name.startswith(("head.", "decoder."))

    def uneven_parts(self, tp_size: int, ep_size: int = 1) -> list[str]:  # noqa: ARG002  # no experts
        """Return the parts that ranks cannot share evenly; see `ModelSpec`."""
        return uneven(tp_size, self.num_heads, self.intermediate_size)


def read(config: Keys, generation: Keys) -> ModernBertSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    common = common_fields(config, generation)
    num_heads = config.integer("num_attention_heads", MAX_HEADS)
    if common["hidden_size"] % (2 * num_heads):
        raise config.error("hidden_size", f"an even multiple of {num_heads} attention heads")
    activation = config.values.get("hidden_activation", "gelu")
    if activation not in ACTIVATIONS:
        raise config.error("hidden_activation", f"one of {', '.join(ACTIVATIONS)}")
    num_layers = config.integer("num_hidden_layers", MAX_LAYERS)
    windowed = read_layer_types(config, num_layers)
    if windowed is None:
        every = config.integer("global_attn_every_n_layers", MAX_LAYERS, 3)
        windowed = frozenset(i for i in range(num_layers) if i % every)
    ropes = (
        read_rope(config, layer_type=kind, theta_key=key, theta=theta)[0]
        for kind, key, theta in (
            ("full_attention", "global_rope_theta", _GLOBAL_THETA),
            ("sliding_attention", "local_rope_theta", _LOCAL_THETA),
        )
    )
    rope, windowed_rope = ropes
    return ModernBertSpec(
        **common,
        context_len=config.integer("max_position_embeddings", MAX_POSITIONS, 8192),
        intermediate_size=config.integer("intermediate_size", MAX_WIDTH),
        num_layers=num_layers,
        num_heads=num_heads,
        norm_eps=config.number("norm_eps", 0.0, 1.0, 1e-5),
        activation=ACTIVATIONS[activation],
        windowed_layers=windowed,
        window=config.integer("local_attention", MAX_POSITIONS, 128) // 2,
        rope=rope,
        windowed_rope=windowed_rope,
        norm_bias=config.flag("norm_bias", False),
        attention_bias=config.flag("attention_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )
