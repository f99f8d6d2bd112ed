"""Runs steps as CUDA graphs: one graph for each bucket of sequences and tokens.

A graph first reads the step's description from a buffer in host memory. All other inputs (tokens,
block tables, KV cache) are in device memory at fixed addresses. A step that is smaller than the
bucket is padded; the padding's keys and values are never read. The graph writes the step's tokens
to another buffer in host memory. Successive steps use different buffers of both kinds.

Without a graph, Python launches the kernels one by one. For a model of a few hundred million
parameters this takes longer than the computation, even for a short prompt.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.decode_step import decode_outputs, fetch_inputs
from kernels.greedy import greedy_tokens
from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import padding_state
from runtime.executor.graph_buckets import Bucket, Buckets, GraphLimits
from runtime.executor.graph_capture import Graph
from runtime.executor.graph_inputs import (
    GraphInputs,
    HostBuffers,
    host_buffers,
    inputs_of,
)
from runtime.executor.memory import GIB
from runtime.executor.prefix_groups import MIN_BATCH, PrefixGroups
from runtime.models.attention.backend import AttentionBackend, SharesPrefixes
from runtime.models.attention.forward_batch import KVCache
from runtime.models.model import CausalLM
from runtime.step.step_plan import Int64Array, StepPlan

logger = logging.getLogger(__name__)

# Graphs of larger decode batches are captured at their first use, because such batches are rare.
FIRST_BATCHES = 256


class GraphRunner:
    """Captures CUDA graphs, and runs the steps that fit one of them.

    Attributes:
        buckets: all buckets, with or without a graph.
        logits: `[max_batch, vocab_size]` float32, the logits of each sequence's last token in the
            latest step that was run with `wants_logits`.
        hidden: `[max_batch, hidden_size]`, the hidden states from which the logits are computed;
            `None` unless graphs keep them.
    """

    def __init__(
        self,
        model: CausalLM,
        attention: AttentionBackend,
        kv: list[KVCache],
        rows: BatchRows,
        page_size: int,
        limits: GraphLimits,
        share: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Allocate the buffers; capture nothing yet.

        `limits` bounds the steps that run as graphs. The other arguments are those of
        `ModelRunner`.
        """
        self._model = model
        self._attention = attention
        self._kv = kv
        self._rows = rows
        self._limits = limits
        self._share = share
        self._pool = limits.make_pool()
        self.buckets = Buckets(limits)
        self._prefixes: PrefixGroups | None = None
        self._sharing: dict[Bucket, Bucket] = {}
        if limits.shares_prefixes and isinstance(attention, SharesPrefixes):
            num_kv_heads = max(cache.k.shape[1] for cache in kv if cache.k.numel())
            self._prefixes = PrefixGroups(rows, page_size, num_kv_heads, attention)
            large = [bucket for bucket in self.buckets.decode if bucket.num_seqs >= MIN_BATCH]
            self._sharing = {bucket: bucket._replace(kind="shared") for bucket in large}
        known = [*self.buckets.decode, *self._sharing.values(), *self.buckets.prompts]
        if rows.adapters is not None:
            self._sharing |= {_adapted(one): _adapted(two) for one, two in self._sharing.items()}
            known += [_adapted(bucket) for bucket in known]
        self._inputs: dict[Bucket, GraphInputs] = {
            bucket: inputs_of(bucket, rows, page_size, padding_state(kv)) for bucket in known
        }
        self._graphs: dict[Bucket, Graph] = {}
        # Buckets whose graph could not be captured later, mostly for lack of memory.
        self._refused: set[Bucket] = set()
        device = rows.device
        most = max(len(each.padding) for each in self._inputs.values())
        self._host = HostBuffers(most, device)
        self._numbers = torch.zeros(most, dtype=torch.int64, device=device)
        # The device's copy of `HostBuffers.turn`: index of the buffer that a graph read last.
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._kept = host_buffers(device, limits.max_batch)
        self._kept_buffers = list(self._kept.numpy())
        self.logits = torch.empty(0)
        self.hidden: Tensor | None = None

    @property
    def captured(self) -> list[Bucket]:
        """The buckets that have a graph, in ascending order."""
        return sorted(self._graphs)

    def capture(self, progress: Callable[[float], None]) -> None:
        """Capture the graphs; `progress` receives the fraction done.

        With one rank, graphs of decode batches above `FIRST_BATCHES` are not captured here but at
        their first use. With tensor parallelism all graphs are captured here, because a rank cannot
        tell the others later that its memory is too small. If a capture fails, all graphs are
        dropped.
        """
        started, free_before = time.perf_counter(), self._free_bytes()
        self._pool.renew()
        self._refused.clear()
        is_alone = self._share is None
        first = self._first()
        try:
            self._allocate_logits()
            # The largest graph comes first, so that the smaller ones fit into its memory.
            for done, bucket in enumerate(sorted(first, reverse=True)):
                progress(done / len(first))
                self._capture(bucket)
        except BaseException:
            # `find` uses every graph that exists, so an incomplete set must not stay.
            self.drop()
            raise
        seconds = time.perf_counter() - started
        logger.info("Captured %d CUDA graphs in %.2f s", len(first), seconds)
        sharing = [each for each in self._sharing.values() if each.num_seqs <= FIRST_BATCHES]
        if is_alone and sharing:
            # One graph for shared prefixes is captured now to compile its kernels. A failure does
            # no harm.
            self._capture_later(sharing[-1])
        free = self._free_bytes()
        if free_before is not None and free is not None:
            logger.info(
                "CUDA graphs take %.2f GiB of what the KV pool left; %.2f GiB stay free",
                (free_before - free) / GIB,
                free / GIB,
            )

    def _first(self) -> list[Bucket]:
        """Return the buckets whose graphs are captured at start."""
        return [
            bucket
            for bucket in self._inputs
            if not bucket.decodes
            or self._share is not None
            or (bucket.num_seqs <= FIRST_BATCHES and bucket.kind == "decode")
        ]

    def _allocate_logits(self) -> None:
        shape = self._limits.max_batch, self._rows.vocab_size
        self.logits = torch.zeros(shape, dtype=torch.float32, device=self._rows.device)

    def request_kernels(self) -> None:
        """Run the work of all graphs once, so that `compiling_ahead` compiles its kernels.

        Capture nothing.
        """
        self._allocate_logits()
        for bucket in [*self._first(), *list(self._sharing.values())[-1:]]:
            self._work(bucket)

    def _free_bytes(self) -> int | None:
        device = self._rows.device
        return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None

    def _capture(self, bucket: Bucket) -> None:
        # The work runs once before the capture. It reads padded buffers that no step in flight
        # uses, because buffers of earlier steps may name rows that belong to other requests now.
        for buffer in self._host.free():
            self._inputs[bucket].pad(buffer)
        if bucket.shares_prefixes and self._prefixes is not None:
            self._prefixes.clear()
        try:
            self._graphs[bucket] = self._pool.capture(lambda: self._work(bucket))
        finally:
            self._turn.fill_(self._host.turn)

    def _capture_later(self, bucket: Bucket) -> None:
        started, size = time.perf_counter(), bucket.num_seqs
        try:
            self._capture(bucket)
        except Exception as error:
            # Too little memory may raise many kinds of errors. Whatever the error was, running
            # without the graph is better than trying again at every step.
            self._refused.add(bucket)
            if self._turn.is_cuda:
                # Work that was launched still reads a buffer that the next step writes.
                torch.cuda.synchronize()
            shared = bucket.shares_prefixes
            instead = "reads shared prefixes row by row" if shared else "runs without"
            logger.warning("No CUDA graph for batch %d: it %s (%s)", size, instead, error)
            return
        seconds = time.perf_counter() - started
        kind = ", for shared prefixes" if bucket.shares_prefixes else ""
        logger.info("Captured the decode graph of batch %d%s in %.2f s", size, kind, seconds)

    def drop(self) -> None:
        """Destroy all graphs; `capture` captures them again."""
        self._graphs.clear()
        self.logits = torch.empty(0)

    def find(self, plan: StepPlan) -> Bucket | None:
        """Return the smallest bucket that fits a step and has a graph; `None` if there is none.

        A decode batch above `FIRST_BATCHES` gets its graph at its first use.
        """
        if not self._graphs:
            return None
        if plan.num_tokens == plan.num_decodes:
            bucket = self.buckets.of_decodes(len(plan.rows))
            bucket = self._with_adapters(bucket)
            if bucket is not None and self._has(bucket):
                return self._with_prefixes(bucket, plan)
        bucket = self._with_adapters(self.buckets.of_prompts(plan))
        return bucket if bucket in self._graphs else None

    def _with_adapters(self, bucket: Bucket | None) -> Bucket | None:
        adapters = self._rows.adapters
        if bucket is None or adapters is None or not adapters.is_on:
            return bucket
        return _adapted(bucket)

    def _with_prefixes(self, bucket: Bucket, plan: StepPlan) -> Bucket:
        """Return the shared-prefix bucket if the step shares prefixes, else `bucket`."""
        sharing, prefixes = self._sharing.get(bucket), self._prefixes
        if sharing is None or prefixes is None or not prefixes.find(plan.rows, plan.start_lens + 1):
            return bucket
        return sharing if self._has(sharing) else bucket

    def _has(self, bucket: Bucket) -> bool:
        if bucket not in self._graphs and bucket not in self._refused:
            self._capture_later(bucket)
        return bucket in self._graphs

    def run(self, bucket: Bucket, plan: StepPlan, *, wants_logits: bool) -> Int64Array:
        """Launch a step.

        Args:
            bucket: the step's bucket, from `find`.
            plan: the step's plan.
            wants_logits: whether `logits` is read afterwards.

        Returns:
            `[num_seqs]` int64 in host memory, the token of each sequence's largest logit, or
            `NAN_TOKEN` for NaN. The tokens are valid from the end of the step on the device until
            the fourth run after this one.
        """
        inputs, turn = self._inputs[bucket], self._host.following
        buffer = self._host.numbers[turn]
        inputs.pad(buffer)
        inputs.put(buffer, plan)
        buffer[inputs.parts["wants_logits"]] = wants_logits
        if bucket.shares_prefixes and self._prefixes is not None:
            self._prefixes.send()
        self._graphs[bucket].replay()
        # The host's index and the device's index advance together. If the launch fails, neither
        # does.
        self._host.turn = turn
        self._rows.forget_unsent()
        self._rows.has_inputs = True
        return self._kept_buffers[turn][: len(plan.rows)]

    @torch.inference_mode()
    def _work(self, bucket: Bucket) -> None:
        inputs, state = self._inputs[bucket], self._rows
        if state.adapters is not None:
            state.adapters.is_on = bucket.adapted
        numbers = self._numbers[: len(inputs.padding)]
        fetch_inputs(self._host.buffers, self._turn, numbers)
        batch = inputs.batch(numbers, self._kv, self._attention)
        self._attention.plan(batch)
        hidden = self._model.forward(batch)
        if self._limits.keep_hidden:
            if self.hidden is None:
                # The first run precedes all captures, so all graphs use this buffer.
                self.hidden = hidden.new_zeros(self._limits.max_batch, hidden.shape[1])
            self.hidden[: bucket.num_seqs].copy_(hidden)
        token_ids = greedy_tokens(
            self._model.model_logits(hidden),
            self.logits[: bucket.num_seqs],
            numbers[inputs.parts["wants_logits"]],
        )
        if self._share is not None:
            token_ids = self._share(token_ids)
        rows = numbers[inputs.parts["rows"]]
        decode_outputs(token_ids, rows, self._turn, state.last_token, self._kept)


def _adapted(bucket: Bucket) -> Bucket:
    return bucket._replace(adapted=True)
