"""Settings of decoders, and how families differ in `config.json`. Front-safe: no torch."""

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

# Places of a layer's norms, with their names in Llama's checkpoints: one before each half.
PRE_NORMS = {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}


@dataclass(frozen=True)
class UngatedMLP:
    """A feed-forward block of two products with an activation between them.

    Attributes:
        activation: the activation.
        up, down: names of the products in a checkpoint.
    """

    activation: Unary
    up: str
    down: str


@dataclass(frozen=True, kw_only=True)
class DecoderTraits:
    """The differences between a family and plain Llama.

    Attributes:
        biases: `never`; `qkv` always on q, k and v; or `keyed` by `attention_bias`, on o too.
        has_mlp_bias: whether `mlp_bias` is read.
        qk_norm: whether heads of q and k are normalised.
        head_dim: default if the key is absent; `None` for `hidden_size / num_attention_heads`.
        window: whether `sliding_window` applies `never`, `always`, or is `switched` on by
            `use_sliding_window` for the layers from `max_window_layers` on.
        default_window: default if `sliding_window` is absent (not if it is null).
    """

    biases: Literal["never", "qkv", "keyed"] = "never"
    has_mlp_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["never", "always", "switched"] = "never"
    default_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class DecoderSpec(ModelSpec):
    """Sizes and other settings of a decoder.

    The method `attention` describes the attention of each layer. A family whose layers differ in
    more than windows and rotations overrides this method; everything else follows from it.

    Attributes:
        num_heads, num_kv_heads, head_dim: query heads, key/value heads and elements of a head, in
            all layers for which `attention` does not set others.
        attention_bias, output_bias, mlp_bias: whether q/k/v, o and the MLP have biases.
        fused_gate_up: whether checkpoints store the MLP's gate and up projections as one tensor.
        qk_norm: whether q and k are normalised: each head by itself (Qwen3).
        has_joint_qk_norm: whether that norm covers all heads of q, or of k, together (OLMo 2).
        sliding_window: keys that each query may see, including its own; `None` for all.
        windowed_layers: indices of the layers that have the window; `None` for every layer.
        windowed_rope: rotation of the layers that have the window; `None` for that of the others.
        zero_centered_norms: whether all norms, including those of heads, multiply by `1 + weight`.
        norms: from place in a layer to name in the checkpoint, for the family's norms: `input_norm`
            and `mlp_norm` before each half, `attention_output_norm` and `mlp_output_norm` after it.
        has_layer_norms: whether norms of the stream are LayerNorms; `rms_norm_eps` is their
            epsilon.
        is_parallel: whether attention and the MLP both read `input_norm`, the layer's only norm.
        activation: activation of the gate in the feed-forward block.
        embedding_scale: multiplies embeddings, rounded to the model's type.
        has_sinks: whether each head has a score without a value.
        rotary_dim: elements of a head that rotate, the first ones; 0 for all.
        score_softcap, logit_softcap: caps of attention's scores and of logits, which become
            `cap * tanh(x / cap)`; 0 leaves them.
        logit_scale: multiplies logits before the cap.
        residual_scale: multiplies what each half of a layer adds to the stream.
        unrotated_layers: indices of layers whose heads do not rotate.
        query_scale: multiplies attention's scores; `None` for `head_dim ** -0.5`.
        experts: experts that replace the feed-forward block in some or all layers.
        rope_axes: for each of a head's angles, the position of a token that rotates it: time, row
            or column, which differ within an image; empty if a token has one position.
        num_extra_layers: layers after the last in a checkpoint, which predict further tokens; not
            loaded.
        is_causal: whether a token sees no later ones; if not, windows extend to both sides.
        position_scale: how queries grow with their positions; `None` if they do not.
        has_norm_biases: whether these LayerNorms have biases.
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
        """See `ModelSpec`: a model saved without its head has names without `model.`."""
        if self.gives == "tokens" or name.startswith(("model.", "lm_head.", "score.")):
            return name
        return f"model.{name}"

    def _list_weights(self) -> Sequence[WeightSpec]:
        return decoder_weights(self)

    @cached_property
    def layer_states(self) -> Sequence[LayerState]:
        """See `ModelSpec`."""
        if self.gives != "tokens":
            return (NoState(),) * self.num_layers
        layers = range(self.num_layers)
        return tuple((self.recurrence(i) or self.attention(i)).state for i in layers)

    def recurrence(self, layer_idx: int) -> RecurrentSpec | None:  # noqa: ARG002  # hybrids know
        """Return the recurrence that a layer has instead of attention; `None` for attention."""
        return None

    def attention(self, layer_idx: int) -> AttentionSpec:
        """Return the description of this layer's attention."""
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
        """A tied head repeats the embeddings."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.tie_word_embeddings else {}

    def untied(self) -> DecoderSpec:
        """See `ModelSpec`."""
        return replace(self, tie_word_embeddings=False, has_own_head=True)

    def is_ignored(self, name: str) -> bool:
        """See `ModelSpec`."""
        first = self.num_layers
        extra = (f"model.layers.{i}." for i in range(first, first + self.num_extra_layers))
        if name.startswith(tuple(extra)):
            return True
        has_spare_head = self.gives != "tokens" and name == "lm_head.weight"
        return has_spare_head or super().is_ignored(name) or is_old_buffer(name)

    def check(self, tp_size: int, *, deterministic: bool) -> None:
        """See `ModelSpec`: torch sums the squares of a rank's heads in an order of its own."""
        if deterministic and tp_size > 1 and self.has_joint_qk_norm:
            raise StartupError(
                f"--enable-deterministic-inference: {self.architecture} has norms over all heads, "
                f"which are not batch-invariant with --tp-size {tp_size}."
            )

    def uneven_parts(self, tp_size: int, ep_size: int = 1) -> list[str]:
        """See `ModelSpec`."""
        layers = [self.recurrence(i) or self.attention(i) for i in range(self.num_layers)]
        # In order, each once.
        found = list(dict.fromkeys(what for each in layers for what in each.uneven_parts(tp_size)))
        if self.fused_qkv and self.num_kv_heads < tp_size:
            # Parts of one tensor that ranks would share are not supported.
            found.append(f"{self.num_kv_heads} key/value heads")
        if self.intermediate_size % tp_size:
            found.append(f"{self.intermediate_size} feed-forward rows")
        if self.experts is not None:
            found += self.experts.uneven_parts(tp_size, ep_size)
        return found

    @property
    def applies_kv_scales(self) -> bool:
        """See `ModelSpec`: latents, and attention with gates, are computed without scales."""
        layers = [self.attention(i) for i in range(self.num_layers) if self.recurrence(i) is None]
        return not any(isinstance(layer, LatentAttentionSpec) or layer.has_gate for layer in layers)

    @property
    def num_experts(self) -> int:
        """See `ModelSpec`."""
        return 0 if self.experts is None else self.experts.num_experts

    @property
    def num_experts_per_token(self) -> int:
        """See `ModelSpec`."""
        return 0 if self.experts is None else self.experts.num_chosen

    @property
    def expert_layers(self) -> list[int]:
        """See `ModelSpec`."""
        return [] if self.experts is None else sorted(self.experts.layers)

    @property
    def num_active_parameters(self) -> int:
        """See `ModelSpec`."""
        idle = 0 if self.experts is None else self.experts.num_idle_parameters(self.hidden_size)
        return self.num_parameters - idle


def decoder_fields(config: Keys, generation: Keys, traits: DecoderTraits) -> dict[str, Any]:
    """Return the fields of a `DecoderSpec`, as `config.json` sets them.

    Raises:
        StartupError: one line says which number is missing or absurd, or what is unsupported.
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
    """Read a decoder with one rotary embedding and a gated MLP of SiLU.

    Raises:
        StartupError: one line says which number is missing or absurd, or what is unsupported.
    """
    fields = silu_decoder_fields(config, generation, traits)
    rope, context_len = read_rope(config)
    return DecoderSpec(**fields, rope=rope, context_len=context_len)


def silu_decoder_fields(config: Keys, generation: Keys, traits: DecoderTraits) -> dict[str, Any]:
    """Return the fields that `decoder_fields` reads, for a family whose MLP has SiLU.

    Raises:
        StartupError: see `decoder_fields`; or the file names another activation.
    """
    if config.values.get("hidden_act", "silu") not in ("silu", "swish", None):
        raise config.error("hidden_act", "'silu'")
    return decoder_fields(config, generation, traits)


def read_layer_types(config: Keys, num_layers: int) -> frozenset[int] | None:
    """Return the layers that `layer_types` calls windowed; `None` when the key is absent.

    Raises:
        StartupError: the key does not give a type for each layer.
    """
    kinds = config.values.get("layer_types")
    if kinds is None:
        return None
    # A tuple: an entry of the file may be a list, which has no hash.
    known = ("full_attention", "sliding_attention")
    is_list = isinstance(kinds, list) and len(kinds) == num_layers
    if not is_list or not all(kind in known for kind in kinds):
        raise config.error("layer_types", f"{num_layers} of full_attention or sliding_attention")
    return frozenset(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def read_window_pattern(config: Keys, num_layers: int, pattern: int) -> frozenset[int]:
    """Return the windowed layers by `layer_types`, or by `sliding_window_pattern` if it is absent.

    Args:
        config: keys of the model.
        num_layers: layers of the model.
        pattern: size of the groups of layers if the file does not say; the last layer of each group
            sees all keys.

    Raises:
        StartupError: see `read_layer_types`; or the size is not such a number.
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
        raise config.error("head_dim", "an even number: halves of a head rotate together")
    return head_dim


def _windows(
    config: Keys, traits: DecoderTraits, num_layers: int
) -> tuple[int | None, frozenset[int] | None]:
    """Return the window and the layers that have it, `None` for all of them."""
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
