"""Replacements for CUDA graphs on the CPU.

`EagerPool` uses the static buffers of graphs, and runs the work by calling it. `RecordedGraph`
behaves like a real graph: it repeats recorded operations on the recorded tensors. Values that the
host computed while recording do not change, and tensors that were replaced later are not used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels import activation, linear, lora, norm, rope, sampling
from kernels.paged_attention.prefix_group import PrefixGroup
from kernels.rope.reference import kv_write, rope_kv_write
from kernels.table import Table
from runtime.executor import build
from runtime.executor.batch_rows import BatchRows
from runtime.executor.graph_buckets import GraphLimits
from runtime.executor.graph_capture import Graph, GraphPool
from runtime.executor.model_runner import ModelRunner
from runtime.models.attention.backend import (
    ATTENTION_BACKENDS,
    DEFAULT_ATTENTION,
    AttentionLayer,
    StepLimits,
)
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.step.step_plan import Int32Array, Int64Array


class EagerGraph:
    """A graph that runs the work by calling it."""

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        self.replay = work


class EagerPool(GraphPool):
    """A pool whose graphs call the work, without capturing."""

    def __init__(self) -> None: ...

    def renew(self) -> None: ...

    def capture(self, work: Callable[[], None]) -> Graph:
        return EagerGraph(work)


class RecordedPool(EagerPool):
    """A pool whose graphs record the work's operations."""

    def capture(self, work: Callable[[], None]) -> Graph:
        return RecordedGraph(work)


class _Tape(TorchDispatchMode):
    """Records each operation with its arguments, and its results that have new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} waits for the device: not while a graph is captured")
        made = func(*args, **kwargs)
        given = {_address(each) for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        fresh = [
            (at, each)
            for at, each in enumerate(tree_leaves(made))
            if _is_tensor(each) and _address(each) not in given
        ]
        self.steps.append((func, args, kwargs, fresh))
        return made


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class RecordedGraph:
    """Records the operations of a second run of the work, as a capture does; repeats them."""

    num_replays = 0

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        with _Tape() as tape:
            work()
        self._steps = tape.steps

    @property
    def made(self) -> list[Tensor]:
        """The tensors to which the operations write; a real graph has its own memory for them."""
        return [tensor for *_, fresh in self._steps for _, tensor in fresh]

    @torch.inference_mode()
    def replay(self) -> None:
        RecordedGraph.num_replays += 1
        for func, args, kwargs, fresh in self._steps:
            made = func(*args, **kwargs)
            # The results are written to the recorded tensors, which later operations read.
            leaves = [made] if _is_tensor(made) or not fresh else tree_leaves(made)
            for at, old in fresh:
                old.copy_(leaves[at])


class TensorAttention:
    """Attention with all numbers in tensors, so that it can be recorded; float32 only."""

    is_graph_safe = True
    reads_host = False

    def __init__(self, device_type: str, limits: StepLimits) -> None:
        self.choices = ()

        self._max_seqs = limits.max_seqs
        self._leaders: Tensor | None = None

    def plan(self, batch: ForwardBatch) -> None: ...

    @torch.inference_mode()
    def put_prefixes(self, groups: Sequence[PrefixGroup]) -> None:
        # As in `TritonAttention`, nothing is sent before the first batch that may share prefixes.
        if self._leaders is None:
            return
        self._leaders.copy_(torch.arange(self._max_seqs))
        self._shared.zero_()
        for group in groups:
            self._leaders[torch.from_numpy(group.members)] = int(group.members[0])
            self._shared[torch.from_numpy(group.members)] = group.length

    def write(self, layer: AttentionLayer, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        kv, slots = batch.kv[layer.layer_idx], batch.slots.clamp(min=0)
        kv_write(k, v, slots, kv.k, kv.v)

    def run(self, layer: AttentionLayer, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        kv = batch.kv[layer.layer_idx]
        heads, kv_heads, dim = layer.num_heads, layer.num_kv_heads, layer.head_dim
        rope_kv_write(
            qkv, heads, kv_heads, dim,
            layer.cos_sin if batch.cos_sin is None else batch.cos_sin, batch.positions,
            # Padding writes to page 0, which no sequence uses.
            batch.slots.clamp(min=0),
            kv.k, kv.v, layer.q_norm, layer.k_norm, layer.eps, layer.zero_centered,
        )  # fmt: skip
        return self.attend(layer, qkv[:, : heads * dim].view(len(qkv), heads, dim), batch)

    def attend(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> Tensor:
        kv = batch.kv[layer.layer_idx]
        num_tokens, heads, dim = q.shape
        kv_heads = layer.num_kv_heads
        sequence = torch.searchsorted(
            batch.qo_indptr[1:], torch.arange(num_tokens, dtype=torch.int32), right=True
        ).clamp(max=len(batch.seq_lens) - 1)
        pages = batch.page_table.index_select(0, sequence).long()
        if batch.shares_prefixes:
            if self._leaders is None:
                # Within the shared prefix, all members read the pages of the first member.
                self._leaders = torch.arange(self._max_seqs)
                self._shared = torch.zeros(self._max_seqs, dtype=torch.int64)
            begin = torch.arange(pages.shape[1]) * kv.k.shape[2]
            shared = begin < self._shared.index_select(0, sequence).unsqueeze(1)
            leaders = self._leaders.index_select(0, sequence)
            pages = torch.where(shared, batch.page_table.index_select(0, leaders).long(), pages)
        # [num_tokens, pages, kv_heads, page_size, dim] to [num_tokens, kv_heads, keys, dim].
        key, value = (
            each[pages].transpose(1, 2).reshape(num_tokens, kv_heads, -1, dim)
            for each in (kv.k, kv.v)
        )
        at = torch.arange(key.shape[2])
        # `batch.positions` are RoPE positions, so the place of a token is computed here.
        behind = batch.qo_indptr[1:].index_select(0, sequence) - torch.arange(num_tokens)
        place = (batch.seq_lens.index_select(0, sequence) - behind).unsqueeze(1)
        visible = at <= place if batch.key_ends is None else at < batch.key_ends.unsqueeze(1)
        if layer.window_left >= 0:
            visible = visible & (at >= place - layer.window_left)
        query = q.reshape(num_tokens, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("tgqd,tgkd->tgqk", query, key) * layer.scale
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        attended = torch.einsum("tgqk,tgkd->tgqd", torch.softmax(scores, -1), value)
        return attended.reshape(num_tokens, heads * dim)


_TABLES: tuple[tuple[Any, Table[Any]], ...] = (
    (activation, activation.ACTIVATION),
    (norm, norm.NORM),
    (rope, rope.ROPE),
    (sampling, sampling.SAMPLING),
    (linear, linear.LINEAR),
    (lora, lora.LORA),
)


def add_eager_graphs(runner: ModelRunner, *, max_batch: int, keep_hidden: bool = False) -> None:
    """Give a runner on the CPU eager graphs for decode steps."""
    runner.add_graphs(GraphLimits(max_batch, keep_hidden=keep_hidden, make_pool=EagerPool))
    runner.capture_graphs(lambda _: None)


def record_graphs_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Let engines on the CPU use recorded graphs, as they would use CUDA graphs on a GPU.

    All operations of a step are torch's own, so that they can be recorded.
    """
    for module, table in _TABLES:
        patch.setitem(table.preferred, "cpu", ("reference",))
        if hasattr(module, "_kernels"):
            patch.setattr(module, "_kernels", module._kernels.__wrapped__)
    patch.setitem(
        ATTENTION_BACKENDS.entries, "recorded", f"{TensorAttention.__module__}:TensorAttention"
    )
    patch.setitem(DEFAULT_ATTENTION, "cpu", "recorded")

    def limits(parts: Any) -> GraphLimits | None:
        if parts.config.disable_cuda_graph:
            return None
        return GraphLimits(
            parts.config.max_running_requests,
            [16, 32, 64, 128],
            keep_hidden=parts.config.enable_return_hidden_states,
            shares_prefixes=parts.model.spec.max_window is None,
            make_pool=RecordedPool,
        )

    patch.setattr(build, "_graph_limits", limits)
    make_rows = BatchRows.__init__

    def make_apart(self: BatchRows, *args: Any, **options: Any) -> None:
        """Create a separate page table, as on a device, so that a page not sent is missing."""
        make_rows(self, *args, **options)
        self.page_table, self._shares_memory = self.page_table.clone(), False

    def in_any_order(self: BatchRows) -> tuple[Int64Array, Int32Array]:
        """Return updates in reverse order, because a device may write them in any order."""
        places, pages = unsent(self)
        return places[::-1].copy(), pages[::-1].copy()

    unsent = BatchRows.unsent_pages
    patch.setattr(BatchRows, "__init__", make_apart)
    patch.setattr(BatchRows, "unsent_pages", in_any_order)
