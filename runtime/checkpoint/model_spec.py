"""`ModelSpec`, the description of a model that all families share: the base of every `spec.py`.

No torch.

A family's `runtime/models/<family>/spec.py` reads `config.json` into a class of its own that
derives from `ModelSpec`. Other code uses only what is declared here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from runtime.checkpoint.score_activation import ScoreActivation
from runtime.checkpoint.sentence_transformers import Pooling, TextPrompts
from runtime.checkpoint.vision_spec import VisionSpec

# What a model computes: logits of the next token, a vector for a text, or a score for each class.
Gives = Literal["tokens", "vectors", "scores"]
# The kind of a weight. A norm multiplies by the weight, a zero-centered norm by 1 plus the weight.
# A scale is what quantized values are multiplied by. `other` belongs to modules of `transformers`,
# and is never quantized.
WeightKind = Literal["matrix", "bias", "norm", "zero_centered_norm", "scale", "other"]
# The plain types in which every weight may be stored, by the names in safetensors files.
FLOATS = ("F32", "F64", "F16", "BF16")


@dataclass(frozen=True)
class WeightSpec:
    """One tensor that a checkpoint must have.

    Attributes:
        name: name in the checkpoint.
        shape: the whole shape, before ranks split the tensor.
        target: the parameter that it fills, such as `model.layers.0.self_attn.qkv_proj.weight`.
        shard: the part of the parameter (`q`, `gate`, ...); empty if it is the whole parameter.
        kind: the kind of weight, which decides the values of dummy weights.
        dtypes: types in which it may be stored.
        of: for a scale, the name of the quantized tensor that it scales. If the checkpoint has
            floats in place of that tensor, the scale is computed. For a tensor of floats, the name
            of the quantized tensor that it becomes. Otherwise empty.
        is_precise: whether the product with this weight is computed in float32, whatever the
            model's type is.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    shard: str = ""
    kind: WeightKind = "matrix"
    dtypes: tuple[str, ...] = FLOATS
    of: str = ""
    is_precise: bool = False

    def has_shape(self, shape: Sequence[int]) -> bool:
        """Whether a tensor may have this shape; for a scale, dimensions of 1 may be missing."""
        if self.kind != "scale":
            return tuple(shape) == self.shape
        first, second = ([size for size in one if size != 1] for one in (shape, self.shape))
        return first == second


class Quantization(ABC):
    """How a quantized model stores its matrices: the part of a method that runs without torch.

    The part with torch (`DeviceMethod`) turns the stored tensors into parameters and products on
    the device. `runtime.models.quantization.registry` lists both parts.

    Attributes:
        method: the method's name in the registry.
        kv_cache_dtype: format of keys and values that the checkpoint was made for, a value of
            `--kv-cache-dtype`.
    """

    method: str
    kv_cache_dtype: str = "auto"

    @abstractmethod
    def expand(self, weight: WeightSpec) -> Sequence[WeightSpec]:
        """Return the tensors that are stored for a weight; the weight itself if it is stored plain.

        Their targets are parameters that the method's part with torch creates in the same layer.
        """

    @abstractmethod
    def kept_bytes(self, weight: WeightSpec, itemsize: int, device: str) -> int:
        """Return the number of bytes that a whole weight takes on a device.

        Args:
            weight: a weight as its family lists it, without quantization.
            itemsize: bytes of a number of the type that the model is computed in.
            device: `cpu` or `cuda`.
        """

    def kv_scales(self, attention: str) -> Mapping[str, str]:  # noqa: ARG002  # most have none
        """Return the names of the scales of an attention module's keys (`k`) and values (`v`).

        The result is empty if the files have none.
        """
        return {}

    def renamed(self, canonical: Callable[[str], str]) -> Quantization:  # noqa: ARG002  # most know none
        """Return the same quantization with `canonical` applied to the tensors' names."""
        return self

    @property
    @abstractmethod
    def description(self) -> str:
        """How matrices are stored, as a text for logs: `GGUF: 210 matrices in Q4_1`."""


@dataclass(frozen=True)
class PagedState:
    """The state of attention: keys and values of every token, in pages.

    Attributes:
        num_kv_heads: key/value heads of all ranks together.
        head_dim: elements of a head.
        window: number of keys that a query attends to, including its own; `None` for all. Keys that
            no later query needs may be dropped.
        form: format in which keys and values are stored, a name of `kernels.kv_forms`; `auto` for
            the model's type.
        is_whole: whether every rank keeps all heads.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None = None
    form: str = "auto"
    is_whole: bool = False

    def heads_of_rank(self, tp_size: int) -> int:
        """Return the key/value heads of one rank; with fewer heads than ranks, they are copied."""
        if self.is_whole:
            return self.num_kv_heads
        return max(1, self.num_kv_heads // tp_size)


@dataclass(frozen=True)
class LatentState(PagedState):
    """The state of attention over latents (MLA): a row for every token, in pages.

    Keys and values are both computed from the row, whose first elements are the values. It counts
    as the row of a single head, and every rank keeps the whole row.
    """


@dataclass(frozen=True)
class SharedState:
    """The state of a layer that reads the keys and values of another layer.

    Attributes:
        layer_idx: index of the layer whose keys and values are read.
    """

    layer_idx: int


@dataclass(frozen=True)
class NoState:
    """No state: the layer sees all tokens of a sequence in one step."""


@dataclass(frozen=True)
class StatePart:
    """One tensor of a recurrent state.

    Attributes:
        shape: the tensor's shape for one sequence, before ranks split it.
        split_dim: index of the dimension that ranks split.
        num_shared, num_groups: the last `num_shared` elements of that dimension belong to
            `num_groups` equal groups. With fewer groups than ranks, several ranks keep a copy of
            one group.
        dtype: the tensor's type; `auto` for the model's type.
    """

    shape: tuple[int, ...]
    split_dim: int = 0
    dtype: Literal["auto", "float32"] = "auto"
    num_shared: int = 0
    num_groups: int = 1

    def shape_of_rank(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape of one rank's part."""
        shape = list(self.shape)
        own = shape[self.split_dim] - self.num_shared
        of_groups = self.num_shared // min(self.num_groups, tp_size)
        shape[self.split_dim] = own // tp_size + of_groups
        return tuple(shape)

    def bytes_of_rank(self, tp_size: int, itemsize: int) -> int:
        """Return the bytes of one rank's part; `itemsize` is for a number of the model's type."""
        size = 4 if self.dtype == "float32" else itemsize
        return math.prod(self.shape_of_rank(tp_size)) * size


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size for all tokens so far, which each further token changes.

    Attributes:
        parts: the tensors of the state.
    """

    parts: tuple[StatePart, ...]


# What one layer keeps of a sequence between steps. KV pools, allocation, prefix cache and estimates
# of memory follow from it.
LayerState = PagedState | SharedState | RecurrentState | NoState


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ABC):
    """The sizes and other settings of a model, in the form that all code uses.

    Attributes:
        architecture: class name in `config.json`, such as `Qwen3ForCausalLM`.
        model_type: `model_type` of `config.json`, such as `qwen3`.
        vocab_size: number of token ids.
        hidden_size: elements of a hidden state.
        context_len: length of the longest sequence that the positions allow, with scaling.
        eos_token_ids: ids that end a text, from `generation_config.json` and `config.json`; for a
            model that serves requests, also from the tokenizer.
        bos_token_id: id that starts a text; `None` if there is none.
        dtype: the checkpoint's own type, such as `bfloat16`.
        generation_defaults: sampling parameters of `generation_config.json`, named as in
            `sampling_params`.
        raw: the whole of `config.json`, with `overrides`.
        overrides: the operator's keys, which replace those of `config.json`.
        gives: what the model computes: `tokens`, `vectors` or `scores`.
        pooling: for vectors or scores, how tokens are pooled, and the layers after that.
        text_limit: for vectors, the maximum number of tokens of a text, as the folder sets it;
            `None` for as many as the positions allow.
        prompts: for vectors, the prompts that may precede a text.
        labels: names of the scores, in order.
        score_activation: for a model with one score, the function that turns it into a relevance.
        vision: how the model takes images; `None` if it takes none.
        quantization: how the model's matrices are stored; `None` for plain numbers.
        has_own_head: whether the files hold a separate output head although `config.json` ties the
            head to the embeddings.
        impl: what serves the model: one of our families (`headrace`), or the adapter to
            `transformers` (`transformers`).
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    context_len: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"
    generation_defaults: dict[str, float | int] = field(default_factory=dict)
    raw: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    gives: Gives = "tokens"
    pooling: Pooling = field(default_factory=Pooling)
    text_limit: int | None = None
    prompts: TextPrompts = field(default_factory=TextPrompts)
    labels: tuple[str, ...] = ()
    score_activation: ScoreActivation = "sigmoid"
    vision: VisionSpec | None = None
    quantization: Quantization | None = None
    has_own_head: bool = False
    impl: Literal["headrace", "transformers"] = "headrace"

    @cached_property
    def logical_weights(self) -> Sequence[WeightSpec]:
        """The weights that the model has without quantization, in the order of the layers."""
        return (*self._list_weights(), *head_weights(self.pooling))

    @cached_property
    def weights(self) -> Sequence[WeightSpec]:
        """The tensors that the checkpoint must have, in the order of the layers."""
        if self.quantization is None:
            return self.logical_weights
        expand = self.quantization.expand
        return tuple(stored for weight in self.logical_weights for stored in expand(weight))

    @cached_property
    def weights_in_floats(self) -> Mapping[str, WeightSpec]:
        """Quantized weights that trainers send as floats under another name than the checkpoint's.

        The keys are the names that a trainer sends. In each description, `target` is that of the
        quantized values, and `of` is their name in the checkpoint.
        """
        if self.quantization is None:
            return {}
        found = {}
        for weight in self.logical_weights:
            codes = self.quantization.expand(weight)[0]
            if codes.name != weight.name:
                found[weight.name] = replace(weight, target=codes.target, of=codes.name)
        return found

    @abstractmethod
    def _list_weights(self) -> Sequence[WeightSpec]:
        """Return the weights of the family, except the layers after the pooling."""

    def canonical(self, name: str) -> str:
        """Return the name in `weights` of a tensor of the checkpoint.

        The two names differ if the model was saved as a part of a larger model.
        """
        return name

    @property
    def output_size(self) -> int:
        """Number of elements of the output for one text, if the model gives vectors or scores."""
        layers = self.pooling.layers
        return layers[-1].out_size if layers else self.hidden_size

    @property
    def token_size(self) -> int:
        """Number of elements of a token's vector, if the model gives one vector per token."""
        return self.output_size if self.pooling.per_token else self.hidden_size

    @property
    @abstractmethod
    def layer_states(self) -> Sequence[LayerState]:
        """What each layer keeps of a sequence between steps."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Maps a name of a checkpoint, such as a tied head's, to the tensor that it repeats."""
        return {}

    def untied(self) -> ModelSpec:
        """Return this model with a separate head, if its head is tied to the embeddings."""
        return self

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor of the checkpoint outside `weights` is known to be unnecessary."""
        return name in self.aliases

    def uneven_parts(self, tp_size: int, ep_size: int = 1) -> list[str]:  # noqa: ARG002  # families know
        """Return what the ranks cannot share evenly, such as `3 attention heads`.

        Args:
            tp_size: ranks that share each layer.
            ep_size: ranks among which whole experts are distributed.
        """
        return []

    def check(self, tp_size: int, *, deterministic: bool) -> None:  # noqa: B027  # families need none
        """Refuse options that the model cannot be served with.

        Args:
            tp_size: ranks that share each layer.
            deterministic: whether no result may depend on the batch.

        Raises:
            StartupError: the model cannot be served with an option, which the message names.
        """

    @property
    def applies_kv_scales(self) -> bool:
        """Whether attention applies the checkpoint's scales of keys and values, if it has some.

        Such a checkpoint was made for 8-bit keys and values with these scales.
        """
        return True

    @property
    def num_experts(self) -> int:
        """Number of experts of a layer; 0 if there are none."""
        return 0

    @property
    def num_experts_per_token(self) -> int:
        """Number of experts that a token passes in a layer; 0 if there are none."""
        return 0

    @property
    def expert_layers(self) -> list[int]:
        """Indices of the layers with experts."""
        return []

    @property
    def num_parameters(self) -> int:
        """Number of elements of all weights together."""
        return sum(math.prod(spec.shape) for spec in self.logical_weights)

    def weight_bytes(self, itemsize: int, device: str) -> int:
        """Return the bytes of all weights on a device.

        Args:
            itemsize: bytes of a number of the type that the model is computed in.
            device: `cpu` or `cuda`.
        """
        if self.quantization is None:
            return self.num_parameters * itemsize
        kept = self.quantization.kept_bytes
        return sum(kept(weight, itemsize, device) for weight in self.logical_weights)

    @property
    def num_active_parameters(self) -> int:
        """Number of weight elements that one token reads: of the experts, only those it passes."""
        return self.num_parameters

    @property
    def keeps_state(self) -> bool:
        """Whether a layer keeps state between steps; if not, a text is computed in one step."""
        return any(not isinstance(state, NoState) for state in self.layer_states)

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer keeps a recurrent state."""
        return any(isinstance(state, RecurrentState) for state in self.layer_states)

    def state_slot_bytes(self, tp_size: int, itemsize: int) -> int:
        """Return the bytes of a slot, which do not depend on the length of a sequence.

        A slot holds one snapshot of a sequence: the states of all recurrent layers, as a rank keeps
        them.

        Args:
            tp_size: ranks that share each layer.
            itemsize: bytes of a number of the model's type.
        """
        return sum(
            part.bytes_of_rank(tp_size, itemsize)
            for state in self.layer_states
            if isinstance(state, RecurrentState)
            for part in state.parts
        )

    @property
    def head_dims(self) -> frozenset[int]:
        """Sizes of the heads whose keys are kept in pages."""
        return frozenset(s.head_dim for s in self.layer_states if isinstance(s, PagedState))

    @property
    def max_window(self) -> int | None:
        """Largest number of keys to which any query attends.

        `None` if some layer attends to all.
        """
        windows = [s.window for s in self.layer_states if isinstance(s, PagedState)]
        known = [window for window in windows if window is not None]
        return max(known) if known and len(known) == len(windows) else None

    @property
    def grouped_window(self) -> int | None:
        """Largest number of keys to which a windowed layer's query attends, if others use all.

        `None` in three cases: no layer has a window, all have one, or a layer keeps something other
        than its own keys and values.
        """
        windows = {s.window if type(s) is PagedState else -1 for s in self.layer_states}
        known = [window for window in windows if window is not None]
        return max(known) if known and None in windows and -1 not in known else None

    @property
    def image_cell(self) -> int:
        """Side, in pixels, of the square of the image that one token stands for.

        It gives an image token's position a row and a column. The value is 0 for a model whose
        image tokens have their index in the sequence as their position, like other tokens.
        """
        return 0


def head_weights(pooling: Pooling) -> list[WeightSpec]:
    """Return the weights of the layers after the pooling, for `head.<i>` and `head.<i>_norm`."""
    weights: list[WeightSpec] = []
    for index, layer in enumerate(pooling.layers):
        target, shape = f"head.{index}", (layer.out_size, layer.in_size)
        weights.append(WeightSpec(f"{layer.name}.weight", shape, f"{target}.weight"))
        if layer.bias:
            weights.append(
                WeightSpec(f"{layer.name}.bias", shape[:1], f"{target}.bias", kind="bias")
            )
        if layer.norm:
            norm = f"{target}_norm"
            weights.append(
                WeightSpec(f"{layer.norm}.weight", shape[:1], f"{norm}.weight", kind="norm")
            )
            if layer.norm_bias:
                weights.append(
                    WeightSpec(f"{layer.norm}.bias", shape[:1], f"{norm}.bias", kind="bias")
                )
    return weights
