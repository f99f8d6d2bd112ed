"""The protocol of an attention back end: plan once a step, run once a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from kernels.table import Choice
from runtime.config.registry import Registry

if TYPE_CHECKING:
    from kernels.paged_attention.prefix_group import PrefixGroup
    from runtime.models.attention.forward_batch import ForwardBatch


class AttentionShape(NamedTuple):
    """The sizes of a layer's attention on which the kernels' work lists and work space depend.

    A work list says which queries and keys each thread block processes. Layers with equal shapes
    share work lists and work space.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int


@dataclass
class AttentionLayer:
    """The constants of one layer's attention on this rank: sizes, scale, rotation and norms.

    Attributes:
        layer_idx: index into `ForwardBatch.kv`. A layer that reads another layer's keys
            (`SharedState`) has that layer's index and only calls `attend`.
        num_heads, num_kv_heads: query heads and key/value heads of this rank.
        head_dim: elements of a query or key head. A head of values also takes this many elements of
            a page.
        scale: factor of the scores, usually `head_dim ** -0.5`.
        cos_sin: `[max_positions, rotary_dim]` float32: in each row `rotary_dim / 2` cosines, then
            as many sines. Only the first `rotary_dim` elements of a head are rotated; usually these
            are the whole head. `None` if `run` must not rotate.
        interleaved: whether neighboring elements form the pairs that are rotated; see `RopeConfig`.
        q_norm, k_norm: `[head_dim]` weights of an RMSNorm that `run` applies to each head before
            rotation, or `None`. `attend` does not apply them.
        eps: epsilon of that norm.
        zero_centered: whether that norm multiplies by `1 + weight` instead of `weight`.
        window_left: maximum number of earlier keys that a query attends to besides its own; -1 for
            all.
        is_rounded: whether float32 operands may be rounded to bfloat16 before they are multiplied.
        value_dim: elements of a head of values, at most `head_dim`; 0 means `head_dim`.
        softcap: if not 0, each scaled score becomes `softcap * tanh(score / softcap)`.
        sinks: `[num_heads]` float32 or `None`: an additional score of each head that takes part in
            the softmax but has no value.
        is_latent: whether the pages hold latents (MLA): keys of one head, whose first `value_dim`
            elements are the values. The layer writes the latents itself and only calls `attend`.
    """

    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos_sin: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 1e-6
    zero_centered: bool = False
    window_left: int = -1
    is_rounded: bool = False
    value_dim: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None
    is_latent: bool = False
    interleaved: bool = False

    @cached_property
    def shape(self) -> AttentionShape:
        """Return the sizes that decide which layers share work lists and work space."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.window_left)

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled (no soft cap, no sinks) and values are as wide as keys."""
        return not self.softcap and self.sinks is None and self.value_dim in (0, self.head_dim)


@dataclass(frozen=True)
class StepLimits:
    """The size of the largest step that a back end must handle.

    Attributes:
        max_seqs: maximum number of sequences in a step.
        max_tokens: maximum number of new tokens in a step, over all sequences.
        max_prompt_tokens: maximum number of prompt tokens in a step. When the first whole prompt
            runs, a back end prepares its kernels for all prompt lengths up to this number. With 0,
            it prepares for a length when the first prompt of that length runs.
    """

    max_seqs: int
    max_tokens: int
    max_prompt_tokens: int = 0


class AttentionBackend(Protocol):
    """Writes keys and values to pages of the KV cache and computes attention over them.

    `plan` runs once a step, the other methods once a layer. A layer either calls `run`, or norms
    and rotates its heads itself and calls `write` and `attend`. `run` does all of this in fewer
    launches.

    Attributes:
        is_graph_safe: whether a CUDA graph may capture all methods, because the host reads nothing
            from the device.
        reads_host: whether the back end needs `ForwardBatch.host` outside graphs.
        choices: the chosen kernels and the reasons, for the log.
    """

    is_graph_safe: ClassVar[bool]
    reads_host: ClassVar[bool]

    @property
    def choices(self) -> tuple[Choice[Any], ...]:
        """Return the chosen kernels and the reasons, for the log."""
        ...

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Prepare for `device_type`, a `torch.device.type`, and steps within `limits`."""
        ...

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for the step `batch`: write the work lists that all layers use."""
        ...

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write one layer's new keys and values to pages of the KV cache.

        Args:
            layer: the layer's constants.
            k: `[num_tokens, num_kv_heads, head_dim]`, already normed and rotated. The elements of a
                head are contiguous; tokens and heads may have any stride.
            v: `[num_tokens, num_kv_heads, value_dim]`, with strides as for `k`.
            batch: the step, after `plan`.
        """
        ...

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute one layer's attention over the keys in its pages, which include this step's.

        Args:
            layer: the layer's constants.
            q: `[num_tokens, num_heads, head_dim]`, already normed and rotated. The heads and
                elements of a token are contiguous; tokens may have any stride.
            batch: the step, after `plan`.

        Returns:
            A new tensor `[num_tokens, num_heads * value_dim]`.
        """
        ...

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Norm and rotate one layer's heads, write keys and values to the pages, and attend.

        Args:
            layer: the layer's constants. Heads of values are as wide as keys.
            qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, changed in place.
            batch: the step, after `plan`; its KV cache gets the new keys and values.

        Returns:
            A new tensor `[num_tokens, num_heads * head_dim]`.
        """
        ...


@runtime_checkable
class SharesPrefixes(Protocol):
    """A back end that reads the keys of a prefix once for all sequences that begin with it.

    It may do so for batches with `ForwardBatch.shares_prefixes` set.
    """

    def put_prefixes(self, groups: Sequence[PrefixGroup]) -> None:
        """Send the groups of sequences with a common prefix to the device.

        The groups apply to the following batches with `ForwardBatch.shares_prefixes`. The call
        returns without waiting; the device reads the groups when it runs a batch.

        Args:
            groups: at most `MAX_GROUPS` groups. A sequence is in at most one of them.
        """
        ...


ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend",
    {
        "cpu": "runtime.models.attention.paged:PagedAttention",
        "torch": "runtime.models.attention.paged:ReferenceAttention",
        "flashinfer": "runtime.models.attention.flashinfer:FlashInferAttention",
        "triton": "runtime.models.attention.triton:TritonAttention",
        "triton_invariant": "runtime.models.attention.triton_invariant:InvariantTritonAttention",
    },
)

# The back end of each device under `--attention-backend auto`.
DEFAULT_ATTENTION = {"cpu": "cpu", "cuda": "triton"}

# The reasons for these defaults, for the log.
DEFAULT_REASONS = {
    "cpu": "the device's kernels over pages",
    "cuda": "planned on the device, within graphs; others plan on the host or compile for minutes",
}

# The variant of a back end whose results have the same bits in every batch.
INVARIANT_ATTENTION = {"cpu": "cpu", "triton": "triton_invariant"}
