"""`config.json` of a decoder, as typed values. Front-safe: no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        scaling: kind of context extension.
        parameters: the scaling's own numbers, as in `config.json` (`factor`, `beta_fast`, ...).
    """

    theta: float = 10000.0
    scaling: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    parameters: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder's shape and numbers.

    Attributes:
        architecture: class name in `config.json`, such as `Qwen3ForCausalLM`.
        context_len: longest sequence the positions allow, scaling included.
        attention_bias, output_bias, mlp_bias: whether q/k/v, o and the MLP have biases.
        qk_norm: whether each head of q and k is normalised (Qwen3).
        sliding_window: keys each query may see, its own included; `None` for all.
        windowed_layers: indices of the layers that have the window; `None` for every layer.
        eos_token_ids: ids that end a text, from `generation_config.json`, else `config.json`.
        dtype: the checkpoint's own type, such as `bfloat16`.
        generation_defaults: sampling keys of `generation_config.json`, native names.
        raw: the whole of `config.json`.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    context_len: int
    tie_word_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: frozenset[int] | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    generation_defaults: dict[str, float | int] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)

    @property
    def has_full_attention(self) -> bool:
        """Whether queries of some layer see all keys."""
        return any(self.layer_window(layer_idx) is None for layer_idx in range(self.num_layers))

    def layer_window(self, layer_idx: int) -> int | None:
        """Return how many keys a query of this layer sees, its own included; `None` for all."""
        if self.windowed_layers is not None and layer_idx not in self.windowed_layers:
            return None
        return self.sliding_window
