"""Decides which steps have a CUDA graph: steps are padded to buckets of sequences and tokens."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.executor.graph_capture import GraphPool
from runtime.step.step_plan import StepPlan

TOKEN_SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
# Sequences of a step with one prompt or a few.
FEW_PROMPTS = 4
# Sequences of a step with new prompts beside a decoding batch.
MIXED_SIZES = (96, 256)
# Launching a step's kernels from Python takes 14 to 25 milliseconds for 32 layers, depending on the
# host. A step that computes for longer hides this, and padding would only add work.
_LAUNCH_BOUND_S = 15e-3
_MATRIX_FLOPS = 600e12
# Attention dominates long prompts, and without a graph whole prompts have a faster kernel. Up to
# this many tokens that kernel saves at most 4% of a step, and a busy host loses that again on
# launches.
_MANY_TOKENS, _LONG_PROMPT = 2048, 4096


@dataclass(frozen=True)
class GraphLimits:
    """The bounds of steps that run as CUDA graphs.

    Attributes:
        max_batch: most sequences of a step.
        token_sizes: most tokens of a step with prompt chunks, for each size of bucket.
        keep_hidden: whether graphs keep hidden states, because rows may request them.
        shares_prefixes: whether rows may share their first keys, because some layer attends to all
            keys.
        make_pool: makes the pool in which the graphs are captured.
    """

    max_batch: int
    token_sizes: list[int] = field(default_factory=list)
    keep_hidden: bool = False
    shares_prefixes: bool = True
    make_pool: Callable[[], GraphPool] = GraphPool


class Bucket(NamedTuple):
    """The set of steps that one graph can run.

    Attributes:
        num_tokens: most tokens.
        num_seqs: most sequences; equal to `num_tokens` if all decode.
        kind: rows that decode one token each; such rows with shared prefixes; only prompts; or
            prompts beside decoding rows. Attention needs different kernels for each kind.
        adapted: whether rows use adapters (LoRA); other steps do not pay for them.
    """

    num_tokens: int
    num_seqs: int
    kind: Literal["decode", "shared", "prompts", "mixed"]
    adapted: bool = False

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences share their first keys."""
        return self.kind == "shared"

    @property
    def decodes(self) -> bool:
        """Whether every sequence decodes one token."""
        return self.kind in ("decode", "shared")


def graph_token_sizes(num_parameters: int, max_tokens: int) -> list[int]:
    """Return token counts, up to `max_tokens`, whose steps take less time than their launches."""
    most = min(_LAUNCH_BOUND_S * _MATRIX_FLOPS / (2 * num_parameters), max_tokens)
    return [size for size in TOKEN_SIZES if size <= most]


def decode_sizes(max_batch: int) -> list[int]:
    """Return batch sizes that get a graph, each a quarter to a half larger than the one before."""
    sizes = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256]
    sizes += range(320, max_batch + 1, 64)
    return sorted({size for size in sizes if size <= max_batch} | {max_batch})


def prompt_buckets(token_sizes: list[int], max_seqs: int) -> list[Bucket]:
    """Return the buckets with prompts, ordered so that the first one that fits is the smallest."""
    kinds: list[tuple[int, Literal["prompts", "mixed"]]] = [(min(FEW_PROMPTS, max_seqs), "prompts")]
    if max_seqs > 1:
        # Sizes are omitted if the largest can be used instead.
        largest = min(MIXED_SIZES[-1], max_seqs)
        sizes = [size for size in MIXED_SIZES if 4 * size <= 3 * largest]
        kinds += [(size, "mixed") for size in [*sizes, largest]]
    buckets = [Bucket(tokens, *kind) for kind in kinds for tokens in token_sizes]
    return [bucket for bucket in buckets if bucket.num_seqs <= bucket.num_tokens]


class Buckets:
    """All buckets of a runner, and the choice of one for a step.

    Attributes:
        decode: buckets of rows that decode one token each, by size.
        prompts: see `prompt_buckets`.
    """

    def __init__(self, limits: GraphLimits) -> None:
        """Build the lists."""
        self._sizes = decode_sizes(limits.max_batch)
        self.decode = [Bucket(size, size, "decode") for size in self._sizes]
        self.prompts = prompt_buckets(limits.token_sizes, limits.max_batch)

    def of_decodes(self, num_seqs: int) -> Bucket | None:
        """Return the smallest bucket for this many rows that decode one token each."""
        index = bisect.bisect_left(self._sizes, num_seqs)
        return self.decode[index] if index < len(self.decode) else None

    def of_prompts(self, plan: StepPlan) -> Bucket | None:
        """Return the smallest bucket for a step with prompts or rows that decode several tokens."""
        # A graph outputs only each sequence's last token, and embeds every token id.
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
