"""The `config.json` of Nemotron-H, whose layers have one block each. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from runtime.checkpoint.config_keys import MAX_HEAD_DIM, MAX_HEADS
from runtime.checkpoint.json_file import Keys
from runtime.checkpoint.model_spec import LayerState, NoState, WeightSpec
from runtime.checkpoint.rope_json import RopeConfig
from runtime.models.decoder.recurrent_spec import Mamba2Spec, RecurrentSpec, check_time_steps
from runtime.models.decoder.spec import DecoderSpec, DecoderTraits, UngatedMLP, decoder_fields
from runtime.models.decoder.weight_map import (
    attention_weights,
    linear_weights,
    mlp_weights,
    norm_weight,
)

TRAITS = DecoderTraits(has_mlp_bias=True, head_dim=128)
# Defaults of `transformers` for absent keys. The readers below hold further defaults.
DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MAMBA, ATTENTION, MLP = "mamba", "attention", "mlp"
# Maps the names of kinds of blocks to the kinds: letters of a pattern, and the names that
# `transformers` 4 and 5 use.
_KINDS = {
    "M": MAMBA,
    "*": ATTENTION,
    "-": MLP,
    "mamba": MAMBA,
    "attention": ATTENTION,
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
    "mlp": MLP,
}
_DEFAULT_KINDS = ["mamba", "moe", "attention", "mlp"]
# Maps parts of our names of weights to the family's.
_NAMES = {
    "model.embed_tokens.": "backbone.embeddings.",
    "model.norm.": "backbone.norm_f.",
    "model.": "backbone.",
    ".self_attn.": ".mixer.",
    ".mlp.": ".mixer.",
}


@dataclass(frozen=True, kw_only=True)
class NemotronHSpec(DecoderSpec):
    """The sizes and other settings of Nemotron-H.

    Attributes:
        mamba: the recurrence of the layers of kind `MAMBA`.
        kinds: for each layer the kind of its only block: `MAMBA`, `ATTENTION` or `MLP`.
    """

    mamba: Mamba2Spec
    kinds: tuple[str, ...]

    @cached_property
    def layer_states(self) -> Sequence[LayerState]:
        """Return the state that each layer keeps between steps."""
        states = super().layer_states
        return tuple(
            NoState() if kind == MLP else state
            for kind, state in zip(self.kinds, states, strict=True)
        )

    def recurrence(self, layer_idx: int) -> RecurrentSpec | None:
        """Return the Mamba 2 recurrence of layer `layer_idx`; `None` if it has none."""
        return self.mamba if self.kinds[layer_idx] == MAMBA else None

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of the checkpoint's tensor `name`.

        In files of `transformers` 5, names begin with `model.`.
        """
        return f"backbone.{name.removeprefix('model.')}" if name.startswith("model.") else name

    @property
    def aliases(self) -> Mapping[str, str]:
        """Return a map from the head's weight to the embeddings' weight if the two are tied."""
        return {"lm_head.weight": "backbone.embeddings.weight"} if self.tie_word_embeddings else {}

    def is_ignored(self, name: str) -> bool:
        """Whether the checkpoint's tensor `name` is not needed.

        Layers that predict further tokens are not loaded.
        """
        return name.startswith("mtp.") or super().is_ignored(name)

    def _list_weights(self) -> Sequence[WeightSpec]:
        shape = self.vocab_size, self.hidden_size
        weights = linear_weights("model.embed_tokens", "model.embed_tokens", shape)
        for layer_idx, kind in enumerate(self.kinds):
            prefix = f"model.layers.{layer_idx}"
            weights.append(norm_weight(f"{prefix}.norm", self.hidden_size))
            if kind == MAMBA:
                weights += self.mamba.weights(prefix, self.hidden_size)
            elif kind == ATTENTION:
                weights += attention_weights(self, layer_idx, prefix)
            else:
                weights += mlp_weights(self, f"{prefix}.mlp")
        weights.append(norm_weight("model.norm", self.hidden_size))
        if not self.tie_word_embeddings:
            weights += linear_weights("lm_head", "lm_head", shape)
        return [replace(weight, name=_stored(weight.name)) for weight in weights]


def _stored(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs, 1)
    return name


def read(config: Keys, generation: Keys) -> NemotronHSpec:
    """Read the family's `config.json`, as `transformers` 4 or 5 writes it.

    Raises:
        StartupError: a number is missing or out of range, or a setting is not supported.
    """
    kinds = _read_kinds(config)
    config = Keys(
        config.source,
        {
            **DEFAULTS,
            "head_dim": config.values.get("attention_head_dim"),
            **config.values,
            "num_hidden_layers": len(kinds),
            "rms_norm_eps": config.number("layer_norm_epsilon", 0.0, 1.0, 1e-5),
        },
    )
    for key, wanted in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if config.values.get(key, wanted) != wanted:
            raise config.error(key, repr(wanted))
    if config.flag("attention_bias", False):
        raise config.error("attention_bias", "false")
    fields = decoder_fields(config, generation, TRAITS)
    return NemotronHSpec(
        **fields,
        # The heads are not rotated.
        rope=RopeConfig(),
        unrotated_layers=frozenset(range(len(kinds))),
        context_len=config.integer("max_position_embeddings", 2**27),
        ungated_mlp=UngatedMLP("relu2", "up_proj", "down_proj"),
        mamba=_read_mamba(config, fields["rms_norm_eps"]),
        kinds=kinds,
    )


def _read_kinds(config: Keys) -> tuple[str, ...]:
    """Return the kind of each layer, from a list or from a pattern of letters."""
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    key = next((key for key in keys if config.values.get(key) is not None), keys[0])
    found = config.values.get(key, _DEFAULT_KINDS)
    if not isinstance(found, list | str) or not found:
        raise config.error(key, "a kind for each layer")
    kinds = tuple(_KINDS.get(kind, "") if isinstance(kind, str) else "" for kind in found)
    if "" in kinds:
        raise config.error(key, "mamba, attention and mlp; experts without gates are unsupported")
    if kinds[0] == MLP:
        raise config.error(key, "mamba or attention first")
    return kinds


def _read_mamba(config: Keys, eps: float) -> Mamba2Spec:
    heads = config.integer("mamba_num_heads", MAX_HEADS, 128)
    groups = config.integer("n_groups", MAX_HEADS, 8)
    if heads % groups:
        raise config.error("n_groups", f"a divisor of {heads} heads")
    check_time_steps(config)
    return Mamba2Spec(
        num_groups=groups,
        num_heads=heads,
        head_dim=config.integer("mamba_head_dim", MAX_HEAD_DIM, 64),
        state_dim=config.integer("ssm_state_size", MAX_HEAD_DIM, 128),
        width=config.integer("conv_kernel", 64, 4, low=2),
        eps=eps,
        has_conv_bias=config.flag("use_conv_bias", True),
        has_bias=config.flag("use_bias", False),
        name="mixer",
    )
