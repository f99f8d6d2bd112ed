"""Decides which steps run as CUDA graphs.

A graph has a fixed number of sequences and tokens, called a bucket. A step uses the smallest bucket
into which it fits, and is padded to the bucket's size.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.executor.graph_capture import GraphPool
from runtime.step.step_plan import StepPlan

TOKEN_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Number of sequences in a bucket for one or a few prompts.
FEW_PROMPTS = 4
# Numbers of sequences in buckets for prompts together with decoding sequences.
MIXED_SIZES = (96, 256)
# To launch the kernels of a step from Python takes 14 to 25 ms for 32 layers, depending on the
# host. A step that computes for longer hides the launches. A graph would only add padding to it.
_LAUNCH_BOUND_S = 15e-3
_MATRIX_FLOPS = 600e12
# Attention dominates long prompts, and without a graph, whole prompts have a faster kernel. For
# steps of at most this many tokens, this kernel saves at most 4% of a step, which a busy host loses
# again on launches.
_MANY_TOKENS, _LONG_PROMPT = 2048, 4096


@dataclass(frozen=True)
class GraphLimits:
    """Limits of the steps that run as CUDA graphs.

    Attributes:
        max_batch: maximum number of sequences of a step.
        token_sizes: token counts of the buckets for steps with prompt chunks.
        keep_hidden: whether graphs keep hidden states, because requests may ask for them.
        shares_prefixes: whether attention may read the keys of a common prefix once for several
            sequences. This needs a layer that attends to all keys.
        make_pool: creates the memory pool of the graphs.
    """

    max_batch: int
    token_sizes: list[int] = field(default_factory=list)
    keep_hidden: bool = False
    shares_prefixes: bool = True
    make_pool: Callable[[], GraphPool] = GraphPool


class Bucket(NamedTuple):
    """The size and the kind of the steps that one CUDA graph can run.

    Attributes:
        num_tokens: maximum number of tokens.
        num_seqs: maximum number of sequences; equal to `num_tokens` if each sequence decodes one
            token.
        kind: "decode": each sequence decodes one token; "shared": the same, and some sequences
            share a prefix; "prompts": only prompts; "mixed": prompts and decoding sequences.
            Attention needs different kernels for each kind.
        adapted: whether sequences use LoRA adapters, which makes a step slower.
    """

    num_tokens: int
    num_seqs: int
    kind: Literal["decode", "shared", "prompts", "mixed"]
    adapted: bool = False

    @property
    def shares_prefixes(self) -> bool:
        """Whether attention reads the keys of common prefixes once for several sequences."""
        return self.kind == "shared"

    @property
    def decodes(self) -> bool:
        """Whether each sequence decodes one token."""
        return self.kind in ("decode", "shared")


def graph_token_sizes(num_parameters: int, max_tokens: int) -> list[int]:
    """Return the token counts of buckets for steps that take longer to launch than to compute.

    Args:
        num_parameters: number of model parameters on this rank.
        max_tokens: maximum number of tokens of a step.
    """
    most = min(_LAUNCH_BOUND_S * _MATRIX_FLOPS / (2 * num_parameters), max_tokens)
    return [size for size in TOKEN_SIZES if size <= most]


def decode_sizes(max_batch: int) -> list[int]:
    """Return the batch sizes of decode buckets in ascending order, up to `max_batch`."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256]
    sizes += range(320, max_batch + 1, 64)
    return sorted({size for size in sizes if size <= max_batch} | {max_batch})


def prompt_buckets(token_sizes: list[int], max_seqs: int) -> list[Bucket]:
    """Return the buckets with prompts; the first one into which a step fits is the smallest."""
    kinds: list[tuple[int, Literal["prompts", "mixed"]]] = [(min(FEW_PROMPTS, max_seqs), "prompts")]
    if max_seqs > 1:
        # A size is omitted if it is close to the largest one.
        largest = min(MIXED_SIZES[-1], max_seqs)
        sizes = [size for size in MIXED_SIZES if 4 * size <= 3 * largest]
        kinds += [(size, "mixed") for size in [*sizes, largest]]
    buckets = [Bucket(tokens, *kind) for kind in kinds for tokens in token_sizes]
    return [bucket for bucket in buckets if bucket.num_seqs <= bucket.num_tokens]


class Buckets:
    """All buckets of a runner; chooses the bucket of a step.

    Attributes:
        decode: buckets for sequences that decode one token each, in ascending order.
        prompts: buckets with prompts, in the order of `prompt_buckets`.
    """

    def __init__(self, limits: GraphLimits) -> None:
        """Create the buckets within `limits`."""
        self._sizes = decode_sizes(limits.max_batch)
        self.decode = [Bucket(size, size, "decode") for size in self._sizes]
        self.prompts = prompt_buckets(limits.token_sizes, limits.max_batch)

    def of_decodes(self, num_seqs: int) -> Bucket | None:
        """Return the smallest bucket for `num_seqs` sequences that decode one token each.

        `None` if there is no such bucket.
        """
        index = bisect.bisect_left(self._sizes, num_seqs)
        return self.decode[index] if index < len(self.decode) else None

    def of_prompts(self, plan: StepPlan) -> Bucket | None:
        """Return the smallest bucket for a step with prompts; `None` if no graph can run the step.

        Sequences that decode several tokens count as prompts.
        """
        # A graph outputs only the last token of each sequence, and reads its inputs as token ids.
        if plan.report_spans or plan.embed_spans or plan.image_spans:
            return None
        num_tokens, num_seqs = plan.num_tokens, len(plan.rows)
        if num_tokens > _MANY_TOKENS and int(plan.query_lens.max()) > _LONG_PROMPT:
            return None
        for bucket in self.prompts:
            is_large_enough = num_tokens <= bucket.num_tokens and num_seqs <= bucket.num_seqs
            if is_large_enough and (bucket.kind == "mixed" or not plan.num_decodes):
                return bucket
        return None
