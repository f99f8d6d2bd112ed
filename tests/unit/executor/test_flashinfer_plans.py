"""What is passed to FlashInfer for a step: a stand-in computes from that alone.

Its kernels need a GPU (`tests/gpu/test_flashinfer.py`); the check of their pages, bounds and
options does not.
"""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.paged_attention import reference
from runtime.models.attention import flashinfer as backend
from runtime.models.attention.backend import AttentionLayer, StepLimits
from runtime.models.attention.forward_batch import ForwardBatch, HostLengths, KVCache
from runtime.models.attention.triton import TritonAttention

HEADS, KV_HEADS, DIM, PAGE = 4, 2, 8, 4


class Wrapper:
    """Attends as planned; records its kind and how often it was planned."""

    made: ClassVar[list[Wrapper]] = []

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "HND"
        assert not workspace.any()
        self.decodes = options.pop("use_tensor_cores", False)
        assert not options
        self.plans: list[Any] = []
        Wrapper.made.append(self)

    def plan(self, *args: Any, **options: Any) -> None:
        arrays, numbers = args[:-4], args[-4:]
        assert numbers == (HEADS, KV_HEADS, DIM, PAGE)
        assert all(array.dtype is torch.int32 for array in arrays)
        assert options.pop("causal", False) != self.decodes
        assert options["q_data_type"] == options["kv_data_type"] == torch.float32
        if self.decodes:
            arrays = torch.arange(len(arrays[0]), dtype=torch.int32), *arrays
        self.plans.append((arrays, options))

    def run(self, q: Tensor, cache: tuple[Tensor, Tensor], out: Tensor) -> None:
        (starts, indptr, pages, last), options = self.plans[-1]
        num_pages = indptr.diff()
        table = torch.zeros(len(last), int(num_pages.max()), dtype=torch.int32)
        for seq, begin in enumerate(indptr[:-1].tolist()):
            count = int(num_pages[seq])
            table[seq, :count] = pages[begin : begin + count]
        lengths = ((num_pages - 1) * PAGE + last).to(torch.int32)
        window, scale = options["window_left"], options["sm_scale"]
        found = reference.paged_attention(q, *cache, table, lengths, starts, scale, window, None)
        out.copy_(found.view(out.shape))


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> backend.FlashInferAttention:
    Wrapper.made.clear()
    module = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Wrapper, BatchDecodeWithPagedKVCacheWrapper=Wrapper
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(TritonAttention, "__init__", lambda *args: None)
    monkeypatch.setattr(TritonAttention, "plan", lambda *args: None)

    def by_triton(
        self: TritonAttention, layer: Any, q: Tensor, out: Tensor, batch: Any, num_seqs: int
    ) -> None:
        attend(layer, q, out, batch, num_seqs)

    monkeypatch.setattr(TritonAttention, "_attend_pages", by_triton)
    return backend.FlashInferAttention("cuda", StepLimits(16, 64))


def attend(layer: Any, q: Tensor, out: Tensor, batch: ForwardBatch, num_seqs: int) -> None:
    """Run the reference on the first sequences."""
    kv, bounds = batch.kv[layer.layer_idx], batch.qo_indptr[: num_seqs + 1]
    table, lengths = batch.page_table[:num_seqs], batch.seq_lens[:num_seqs]
    tokens = int(bounds[-1])
    out[:tokens] = reference.paged_attention(
        q[:tokens], kv.k, kv.v, table, lengths, bounds, layer.scale, layer.window_left, None
    )


def step(queries: list[int], lengths: list[int], num_decodes: int) -> ForwardBatch:
    """Return a step of sequences with these numbers of new tokens and keys, on shuffled pages."""
    needed = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(needed), dtype=torch.int32) + 1
    table = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
    for seq, part in enumerate(order.split(needed)):
        table[seq, : needed[seq]] = part
    shape = sum(needed) + 1, KV_HEADS, PAGE, DIM
    indptr = np.cumsum([0, *queries]).astype(np.int32)
    seq_lens = np.array(lengths, dtype=np.int32)
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=nothing,
        positions=nothing,
        slots=nothing,
        qo_indptr=torch.from_numpy(indptr),
        seq_lens=torch.from_numpy(seq_lens),
        page_table=table,
        num_decodes=num_decodes,
        logits_indices=nothing,
        kv=[KVCache(torch.randn(shape), torch.randn(shape))],
        attention=None,  # type: ignore[arg-type]
        host=HostLengths(indptr, seq_lens, table.numpy()),
    )


@pytest.mark.parametrize("window", [-1, 5])
@pytest.mark.parametrize(
    ("queries", "lengths", "num_decodes"),
    [
        ([1, 1, 1], [9, 4, 1], 3),
        ([3, 8, 1], [3, 17, 4], 0),
        ([1, 1, 5, 2], [12, 7, 5, 30], 2),
    ],
    ids=["decode", "chunks", "both"],
)
def test_every_step_matches_the_reference(
    queries: list[int],
    lengths: list[int],
    num_decodes: int,
    window: int,
    attention: backend.FlashInferAttention,
) -> None:
    layer = AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.3, torch.zeros(0), window_left=window)
    for turn in range(4):
        batch = step(queries, [length + turn for length in lengths], num_decodes)
        if num_decodes == 0:
            batch = step(queries, lengths, num_decodes)
        q = torch.randn(sum(queries), HEADS, DIM)
        wanted = torch.empty(len(q), HEADS * DIM)
        attend(layer, q, wanted, batch, len(queries))
        attention.plan(batch)
        for _ in range(2):
            out = torch.full_like(wanted, float("nan"))
            attention._attend_pages(layer, q, out, batch, len(queries))
            assert torch.allclose(out, wanted, atol=1e-5)
    # Planned once a step, and not again before the earlier steps are done.
    assert [len(each.plans) for each in Wrapper.made] == [2, 1, 1]
    assert all(each.decodes == (num_decodes == len(queries)) for each in Wrapper.made)


def test_rows_beside_whole_prompts_stay_with_triton(
    attention: backend.FlashInferAttention,
) -> None:
    """Whole prompts have a separate kernel: only the rows before them are attended here."""
    layer = AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.3, torch.zeros(0))
    batch = step([1, 1, 6], [9, 4, 6], 2)
    q, out = torch.randn(2, HEADS, DIM), torch.full((2, HEADS * DIM), float("nan"))
    attention.plan(batch)
    attention._attend_pages(layer, q, out, batch, 2)
    assert not out.isnan().any()
    assert not Wrapper.made


@pytest.mark.parametrize("kind", ["in a graph", "with an image"])
def test_what_the_host_cannot_plan_stays_with_triton(
    kind: str, attention: backend.FlashInferAttention
) -> None:
    layer = AttentionLayer(0, HEADS, KV_HEADS, DIM, 0.3, torch.zeros(0))
    batch = step([1, 1], [9, 4], 2)
    if kind == "in a graph":
        batch.host = None
    else:
        batch = step([3, 8], [3, 17], 0)
        batch.key_ends = torch.tensor([1, 3, 3, *range(10, 18)], dtype=torch.int32)
    num_tokens = int(batch.qo_indptr[-1])
    q, out = torch.randn(num_tokens, HEADS, DIM), torch.full((num_tokens, HEADS * DIM), math.nan)
    attention.plan(batch)
    attention._attend_pages(layer, q, out, batch, 2)
    assert not out.isnan().any()
    assert not Wrapper.made


@pytest.mark.parametrize(
    ("group", "multiprocessors", "tile"),
    [
        # A prompt chunk after a long prefix without FlashAttention-3: L40S, A100.
        (8, 142, 128),
        (16, 142, 128),
        (8, 108, 128),
        # Decoding rows on an H200, with one key head too.
        (16, 132, 16),
        (32, 132, 64),
    ],
)
def test_there_is_room_for_the_parts_of_split_sequences(
    group: int, multiprocessors: int, tile: int
) -> None:
    """In the layout of FlashInfer 0.6.14 (`scheduler.cuh`); with less room it refuses the step."""
    programs = 2 * multiprocessors
    rows = group * programs * tile
    assert rows * (128 + 1) * 4 <= backend.WORKSPACE_BYTES
