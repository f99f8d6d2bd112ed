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
    """The sizes and settings on which work lists and work space depend.

    Layers with equal shapes share work lists and work space.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window_left: int


@dataclass
class AttentionLayer:
    """One layer's attention on this rank, besides q, k and v.

    Attributes:
        layer_idx: index into `ForwardBatch.kv`. A layer that reads another layer's keys finds them
            there (`SharedState`), and only calls `attend`.
        num_heads, num_kv_heads: query heads and key/value heads of this rank.
        head_dim: elements of a head of queries and keys, and of its place in the pages.
        scale: multiplies the scores, usually `head_dim ** -0.5`.
        cos_sin: `[max_positions, rotary_dim]` float32, cosines then sines, half each; `None` if
            `run` should not rotate. Usually a whole head rotates, else its first `rotary_dim`
            elements.
        interleaved: whether neighbors rotate together; see `RopeConfig`.
        q_norm, k_norm: `[head_dim]` weights of a per-head RMSNorm before rotation, or `None`; only
            `run` applies them.
        eps: epsilon of that norm.
        zero_centered: whether that norm's factors are `1 + weight`.
        window_left: keys a query may look back on besides itself; -1 for all.
        is_rounded: whether float32 may be multiplied as bfloat16.
        value_dim: elements of a head of values, at most `head_dim`; 0 for `head_dim`.
        softcap: scaled scores become `softcap * tanh(score / softcap)`; 0 leaves them.
        sinks: `[num_heads]` float32, a score of each head that has no value, or `None`.
        is_latent: whether the pages hold latents: keys of one head whose first `value_dim` elements
            are the values. The layer writes them itself and only calls `attend`.
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
        """The key of work lists and work space."""
        return AttentionShape(self.num_heads, self.num_kv_heads, self.head_dim, self.window_left)

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled, and values are as wide as keys."""
        return not self.softcap and self.sinks is None and self.value_dim in (0, self.head_dim)


@dataclass(frozen=True)
class StepLimits:
    """The largest step.

    Attributes:
        max_seqs: most sequences of a step.
        max_tokens: most new tokens of a step, over all sequences.
        max_prompt_tokens: most prompt tokens of a step. At the first whole prompt, a back end
            prepares for all lengths up to this one. With 0 it prepares for each new length when a
            prompt has that length.
    """

    max_seqs: int
    max_tokens: int
    max_prompt_tokens: int = 0


class AttentionBackend(Protocol):
    """Writes keys and values to pages and attends; owns the layout of its own plan only.

    A layer calls `write` and `attend` with heads that it made itself, or `run`, which also rotates
    them, in fewer launches.

    Attributes:
        is_graph_safe: whether all methods may be captured in a CUDA graph: the host reads
            nothing from the device.
        reads_host: whether it needs `ForwardBatch.host` outside graphs.
        choices: the chosen kernels and the reasons, for the log.
    """

    is_graph_safe: ClassVar[bool]
    reads_host: ClassVar[bool]

    @property
    def choices(self) -> tuple[Choice[Any], ...]:
        """See above."""
        ...

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        """Prepare for `device_type`, a `torch.device.type`, and steps within `limits`."""
        ...

    def plan(self, batch: ForwardBatch) -> None:
        """Prepare for `batch`, once for all layers."""
        ...

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Write one layer's new keys and values to their pages.

        Args:
            layer: the layer's constants.
            k: `[num_tokens, num_kv_heads, head_dim]`, normed and rotated; elements contiguous,
                tokens and heads at any stride.
            v: `[num_tokens, num_kv_heads, value_dim]`, likewise.
            batch: the planned batch.
        """
        ...

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        """Attend one layer over the keys in its pages, which include this step's.

        Args:
            layer: the layer's constants.
            q: `[num_tokens, num_heads, head_dim]`, normed and rotated; heads and elements
                contiguous, tokens at any stride.
            batch: the planned batch.

        Returns:
            `[num_tokens, num_heads * value_dim]`.
        """
        ...

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Norm and rotate the heads of one layer, write and attend.

        Args:
            layer: the layer's constants.
            qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, changed in place. All
                heads have one size here.
            batch: the planned batch; its cache gets the new keys and values.

        Returns:
            `[num_tokens, num_heads * head_dim]`.
        """
        ...


@runtime_checkable
class SharesPrefixes(Protocol):
    """A back end that supports `ForwardBatch.shares_prefixes`."""

    def put_prefixes(self, groups: Sequence[PrefixGroup]) -> None:
        """Send the groups for the following batches with `shares_prefixes`.

        Returns without waiting; the device reads the groups when it runs a batch.

        Args:
            groups: at most `MAX_GROUPS`, no sequence in two of them.
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

# What `auto` means on each device.
DEFAULT_ATTENTION = {"cpu": "cpu", "cuda": "triton"}

# Why, for the log.
DEFAULT_REASONS = {
    "cpu": "the device's kernels over pages",
    "cuda": "planned on the device, within graphs; others plan on the host or compile for minutes",
}

# The form of a back end whose results do not depend on the batch.
INVARIANT_ATTENTION = {"cpu": "cpu", "triton": "triton_invariant"}
