"""The settings of decoders, and the differences of families in `config.json`.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from runtime.checkpoint.attention_spec import AttentionSpec, LatentAttentionSpec, PositionScale
from runtime.checkpoint.config_keys import (
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    common_fields,
)
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import LayerState, ModelSpec, NoState, WeightSpec
from runtime.checkpoint.rope_json import RopeConfig, read_rope
from runtime.errors import StartupError
from runtime.models.decoder.weight_map import decoder_weights, is_old_buffer

if TYPE_CHECKING:
    from kernels.activation import Activation, Unary
    from runtime.models.decoder.experts_spec import ExpertsSpec
    from runtime.models.decoder.recurrent_spec import RecurrentSpec

# The places of a layer's norms in Llama, with their names in its checkpoints: one norm before
# attention and one before the MLP.
PRE_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class UngatedMLP:
    """A feed-forward block without a gate: two matrix products with an activation between them.

    Attributes:
        activation: the activation.
        up, down: names of the two matrices in a checkpoint.
    """

    activation: Unary
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class DecoderTraits:
    """The differences between a family and plain Llama.

    Attributes:
        biases: which products of attention have biases. `never`: none. `qkv`: always q, k and v.
            `keyed`: q, k, v and o if `config.json` sets `attention_bias`.
        has_mlp_bias: whether the key `mlp_bias` is read.
        qk_norm: whether heads of q and k are normalised.
        head_dim: value of an absent `head_dim`; `None` for `hidden_size / num_attention_heads`.
        window: which layers have the window `sliding_window`. `never`: none. `always`: all.
            `switched`: if `use_sliding_window` is set, the layers from `max_window_layers` on.
        default_window: value of an absent `sliding_window`. A null means no window.
    """

    biases: Literal["never", "qkv", "keyed"] = "never"
    has_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["never", "always", "switched"] = "never"
    default_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """The sizes and other settings of a decoder.

    The method `attention` describes the attention of each layer. A family whose layers differ in
    more than windows and rotations overrides this method; everything else follows from it.

    Attributes:
        num_heads, num_kv_heads, head_dim: query heads, key/value heads and elements of a head, in
            all layers for which `attention` does not set others.
        attention_bias, output_bias, mlp_bias: whether q/k/v, o and the MLP have biases.
        fused_gate_up: whether checkpoints store the MLP's gate and up projections as one tensor.
        qk_norm: whether q and k are normalised. Each head is normalised by itself (Qwen3) unless
            `has_joint_qk_norm` is set.
        has_joint_qk_norm: whether the norm covers all heads of q, or of k, together (OLMo 2).
        sliding_window: maximum number of keys that a query attends to, with its own; `None` for
            all.
        windowed_layers: indices of the layers that have the window; `None` for every layer.
        windowed_rope: rotary embedding of the layers that have the window; `None` if it is `rope`.
        zero_centered_norms: whether all norms, including those of heads, multiply by `1 + weight`.
        norms: the family's norms, a map from the place in a layer to the name in the checkpoint.
            `input_norm` and `mlp_norm` come before attention and the MLP, `attention_output_norm`
            and `mlp_output_norm` after them.
        has_layer_norms: whether norms of the residual stream are LayerNorms, with the epsilon
            `rms_norm_eps`.
        is_parallel: whether attention and the MLP both read the output of `input_norm`, the layer's
            only norm.
        activation: activation of the gate in the feed-forward block.
        embedding_scale: factor of the embeddings, rounded to the model's dtype.
        has_sinks: whether each head has one more score in the softmax, without a value.
        rotary_dim: number of a head's first elements that are rotated; 0 for all.
        score_softcap, logit_softcap: cap of attention's scores and of logits. If it is not 0, `x`
            becomes `cap * tanh(x / cap)`.
        logit_scale: factor of the logits, applied before the cap.
        residual_scale: factor of what attention and the MLP add to the residual stream.
        unrotated_layers: indices of layers that do not rotate queries and keys.
        query_scale: factor of attention's scores; `None` for `head_dim ** -0.5`.
        experts: experts that replace the feed-forward block in some or all layers.
        rope_axes: for each rotation angle of a head, the axis whose position determines it: time,
            row or column. The three positions of a token differ within an image. Empty if a token
            has one position.
        num_extra_layers: number of layers after the last one in a checkpoint. They predict further
            tokens and are not loaded.
        is_causal: whether a token attends only to earlier tokens and itself. If not, windows extend
            to both sides.
        position_scale: how the scale of queries grows with their positions; `None` if it is
            constant.
        has_norm_biases: whether the LayerNorms of the residual stream have biases.
        ungated_mlp: the feed-forward block, if it has no gate.
        fused_qkv: whether checkpoints store q, k and v as one tensor.
    """

    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    fused_gate_up: bool = False
    qk_norm: bool = False
    has_joint_qk_norm: bool = False
    sliding_window: int | None = None
    windowed_layers: frozenset[int] | None = None
    windowed_rope: RopeConfig | None = None
    zero_centered_norms: bool = False
    norms: Mapping[str, str] = field(default_factory=lambda: dict(PRE_NORMS))
    has_layer_norms: bool = False
    is_parallel: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    has_sinks: bool = False
    rotary_dim: int = 0
    score_softcap: float = 0.0
    logit_softcap: float = 0.0
    logit_scale: float = 1.0
    residual_scale: float = 1.0
    unrotated_layers: frozenset[int] = frozenset()
    query_scale: float | None = None
    experts: ExpertsSpec | None = None
    rope_axes: tuple[int, ...] = ()
    num_extra_layers: int = 0
    is_causal: bool = True
    position_scale: PositionScale | None = None
    has_norm_biases: bool = False
    ungated_mlp: UngatedMLP | None = None
    fused_qkv: bool = False

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`.

        Names lack `model.` in checkpoints that were saved without a head.
        """
        if self.gives == "tokens" or name.startswith(("model.", "lm_head.", "score.")):
            return name
        return f"model.{name}"

    def _list_weights(self) -> Sequence[WeightSpec]:
        return decoder_weights(self)

    @cached_property
    def layer_states(self) -> Sequence[LayerState]:
        """Return the state that each layer keeps between steps; see `ModelSpec`."""
        if self.gives != "tokens":
            return (NoState(),) * self.num_layers
        layers = range(self.num_layers)
        return tuple((self.recurrence(i) or self.attention(i)).state for i in layers)

    def recurrence(self, layer_idx: int) -> RecurrentSpec | None:  # noqa: ARG002  # hybrids know
        """Return the recurrence of layer `layer_idx`; `None` if the layer has attention."""
        return None

    def attention(self, layer_idx: int) -> AttentionSpec:
        """Return the description of the attention of layer `layer_idx`."""
        is_windowed = self.windowed_layers is None or layer_idx in self.windowed_layers
        window = self.sliding_window if is_windowed else None
        has_own_rope = self.windowed_rope is not None and window is not None
        rope = self.windowed_rope if has_own_rope else self.rope
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.query_scale is None else self.query_scale,
            window=window,
            has_sinks=self.has_sinks,
            softcap=self.score_softcap,
            rotary_dim=self.rotary_dim,
            rope=None if layer_idx in self.unrotated_layers else rope,
            position_scale=self.position_scale,
        )

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return a map from the head's weight to the embeddings' weight if the two are tied."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tie_word_embeddings else {}

    def untied(self) -> DecoderSpec:
        """Return this spec with a separate output head, if its head is tied to the embeddings."""
        return replace(self, tie_word_embeddings=False, has_own_head=True)

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed; see `ModelSpec`."""
        first = self.num_layers
        extra = (f"model.layers.{i}." for i in range(first, first + self.num_extra_layers))
        if name.startswith(tuple(extra)):
            return True
        has_spare_head = self.gives != "tokens" and name == "lm_head.weight"
        return has_spare_head or super().is_ignored(name) or is_old_buffer(name)

    def check(self, tp_size: int, *, deterministic: bool) -> None:
        """Refuse deterministic inference if ranks share a norm over all heads; see `ModelSpec`.

        torch sums the squares of a rank's heads in an order of its own.
        """
        recurrent = (self.recurrence(i) for i in range(self.num_layers))
        has_wide_norm = self.has_joint_qk_norm or any(
            each is not None and each.norms_across_ranks(tp_size) for each in recurrent
        )
        if deterministic and tp_size > 1 and has_wide_norm:
            raise StartupError(
                f"--enable-deterministic-inference: {self.architecture} has norms over all heads, "
                f"which are not batch-invariant with --tp-size {tp_size}."
            )

    def uneven_parts(self, tp_size: int, ep_size: int = 1) -> list[str]:
        """Return the parts that ranks cannot share evenly; see `ModelSpec`."""
        layers = [self.recurrence(i) or self.attention(i) for i in range(self.num_layers)]
        # Keeps the order of the layers, and each part only once.
        found = list(dict.fromkeys(what for each in layers for what in each.uneven_parts(tp_size)))
        if self.fused_qkv and self.num_kv_heads < tp_size:
            # Ranks cannot share one key/value head of a fused tensor.
            found.append(f"{self.num_kv_heads} key/value heads")
        if self.intermediate_size % tp_size:
            found.append(f"{self.intermediate_size} feed-forward rows")
        if self.experts is not None:
            found += self.experts.uneven_parts(tp_size, ep_size)
        return found

    @property
    def applies_kv_scales(self) -> bool:
        """Whether the scales of stored keys and values are used; see `ModelSpec`.

        Attention over latents and attention with gates do not use them.
        """
        layers = [self.attention(i) for i in range(self.num_layers) if self.recurrence(i) is None]
        return not any(isinstance(layer, LatentAttentionSpec) or layer.has_gate for layer in layers)

    @property
    def num_experts(self) -> int:
        """Experts of a layer, 0 without a mixture; see `ModelSpec`."""
        return 0 if self.experts is None else self.experts.num_experts

    @property
    def num_experts_per_token(self) -> int:
        """Experts that a token passes in a layer, 0 without a mixture; see `ModelSpec`."""
        return 0 if self.experts is None else self.experts.num_chosen

    @property
    def expert_layers(self) -> list[int]:
        """Indices of the layers that have experts; see `ModelSpec`."""
        return [] if self.experts is None else sorted(self.experts.layers)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token uses; see `ModelSpec`."""
        idle = 0 if self.experts is None else self.experts.num_idle_parameters(self.hidden_size)
        return self.num_parameters - idle


def decoder_fields(config: Keys, generation: Keys, traits: DecoderTraits) -> dict[str, Any]:
    """Return the fields of a `DecoderSpec` that `config.json` sets.

    Args:
        config: keys of `config.json`.
        generation: keys of `generation_config.json`.
        traits: the family's differences from Llama.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    common = common_fields(config, generation)
    hidden_size = common["hidden_size"]
    num_layers = config.integer("num_hidden_layers", MAX_LAYERS)
    num_heads = config.integer("num_attention_heads", MAX_HEADS)
    num_kv_heads = config.integer("num_key_value_heads", MAX_HEADS, num_heads)
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of {num_heads} attention heads")
    has_bias = traits.biases == "keyed" and config.flag("attention_bias", False)
    window, windowed_layers = _windows(config, traits, num_layers)
    return {
        **common,
        "intermediate_size": config.integer("intermediate_size", MAX_WIDTH),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": _head_dim(config, traits, hidden_size, num_heads),
        "rms_norm_eps": config.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        "tie_word_embeddings": config.flag("tie_word_embeddings", False),
        "attention_bias": has_bias or traits.biases == "qkv",
        "output_bias": has_bias,
        "mlp_bias": traits.has_mlp_bias and config.flag("mlp_bias", False),
        "qk_norm": traits.qk_norm,
        "sliding_window": window,
        "windowed_layers": windowed_layers,
    }


def read_decoder(config: Keys, generation: Keys, traits: DecoderTraits) -> DecoderSpec:
    """Return the settings of a decoder with SiLU gates and one rotary embedding for all layers.

    Args:
        config: keys of `config.json`.
        generation: keys of `generation_config.json`.
        traits: the family's differences from Llama.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    fields = silu_decoder_fields(config, generation, traits)
    rope, context_len = read_rope(config)
    return DecoderSpec(**fields, rope=rope, context_len=context_len)


def silu_decoder_fields(config: Keys, generation: Keys, traits: DecoderTraits) -> dict[str, Any]:
    """Return the fields that `decoder_fields` reads, for a family whose MLP is gated with SiLU.

    Raises:
        StartupError: a number is missing or out of range, or a setting, such as another activation,
            is not supported.
    """
    if config.values.get("hidden_act", "silu") not in ("silu", "swish", None):
        raise config.error("hidden_act", "'silu'")
    return decoder_fields(config, generation, traits)


def read_layer_types(config: Keys, num_layers: int) -> frozenset[int] | None:
    """Return the layers to which `layer_types` gives a window; `None` if the key is absent.

    Raises:
        StartupError: the key does not give a type for each layer.
    """
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    # A tuple, not a set: an entry of the file may be a list, which cannot be hashed.
    known = ("full_attention", "sliding_attention")
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in known for kind in kinds):
        raise config.error(
            "layer_types", f"{num_layers} entries, each full_attention or sliding_attention"
        )
    return frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def read_window_pattern(config: Keys, num_layers: int, pattern: int) -> frozenset[int]:
    """Return the layers that have a window.

    The key `layer_types` lists them. If it is absent, `sliding_window_pattern` gives the size of
    groups of layers: the last layer of each group attends to all keys, the others have the window.

    Args:
        config: keys of the model's `config.json`.
        num_layers: layers of the model.
        pattern: value of an absent `sliding_window_pattern`.

    Raises:
        StartupError: `layer_types` does not give a type for each layer, or `sliding_window_pattern`
            is out of range.
    """
    layers = read_layer_types(config, num_layers)
    if layers is not None:
        return layers
    pattern = config.integer("sliding_window_pattern", MAX_LAYERS, pattern)
    return frozenset(i for i in range(num_layers) if (i + 1) % pattern)


def _head_dim(config: Keys, traits: DecoderTraits, hidden_size: int, num_heads: int) -> int:
    if config.values.get("head_dim") is None and traits.head_dim is None:
        if hidden_size % num_heads or hidden_size // num_heads % 2:
            raise config.error("hidden_size", f"an even multiple of {num_heads} attention heads")
        return hidden_size // num_heads
    head_dim = config.integer("head_dim", MAX_HEAD_DIM, traits.head_dim, low=2)
    if head_dim % 2:
        raise config.error("head_dim", "an even number, for two halves of a head")
    return head_dim


def _windows(
    config: Keys, traits: DecoderTraits, num_layers: int
) -> tuple[int | None, frozenset[int] | None]:
    """Return the window and the layers that have it; `None` instead of layers means all layers."""
    if traits.window == "never":
        return None, None
    if traits.window == "switched" and not config.flag("use_sliding_window", False):
        return None, None
    if "sliding_window" in config.values and config.values["sliding_window"] is None:
        return None, None
    window = config.integer("sliding_window", 2**31 - 1, traits.default_window)
    if traits.window == "always":
        return window, None
    layers = read_layer_types(config, num_layers)
    if layers is None:
        first = config.integer("max_window_layers", MAX_LAYERS, 28, low=0)
        layers = frozenset(range(first, num_layers))
    return (window, layers) if layers else (None, None)
