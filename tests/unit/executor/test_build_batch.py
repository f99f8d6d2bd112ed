"""From a plan's sequences to the model's flat input."""

from __future__ import annotations

import numpy as np
import torch

from runtime.executor.batch_rows import BatchRows
from runtime.executor.build_batch import build_batch
from runtime.models.attention.paged import ReferenceAttention
from runtime.step.step_plan import EmbedSpan, StepPlan

PAGE = 4


def test_decoding_rows_of_one_token_and_of_several_beside_prompts() -> None:
    rows = BatchRows(max_rows=6, max_pages=8, max_len=32, vocab_size=50)
    rows.page_table_host[:6] = 10 * np.arange(6)[:, None] + np.arange(8)
    rows.last_token[:] = torch.tensor([30, 31, 32, 33, 34, 35, 0])
    plan = StepPlan(
        rows=np.array([3, 1, 0, 5]),
        num_decodes=2,
        start_lens=np.array([6, 7, 4, 0]),
        query_lens=np.array([1, 3, 2, 2]),
        # Two tokens of the second row, then the chunks' tokens; the last chunk is given as
        # embeddings.
        chunk_tokens=np.array([7, 8, 40, 41, 0, 0], dtype=np.int32),
        samples=np.array([True, True, False, True]),
        embed_spans=[EmbedSpan(4, 2, np.arange(6, dtype=np.float32).tobytes())],
    )
    batch = build_batch(plan, rows, PAGE, [], ReferenceAttention())
    assert batch.input_ids.tolist() == [33, 31, 7, 8, 40, 41, 0, 0]
    assert batch.positions.tolist() == [6, 7, 8, 9, 4, 5, 0, 1]
    pages = [31, 11, 12, 12, 1, 1, 50, 50]
    offsets = [2, 3, 0, 1, 0, 1, 0, 1]
    assert batch.slots.tolist() == [p * PAGE + o for p, o in zip(pages, offsets, strict=True)]
    assert batch.qo_indptr.tolist() == [0, 1, 4, 6, 8]
    assert batch.seq_lens.tolist() == [7, 10, 6, 2]
    assert batch.logits_indices is not None
    assert batch.logits_indices.tolist() == [0, 3, 7]
    # The number of sequences that a kernel for one query each may take.
    assert batch.num_decodes == 1
    assert batch.whole_prompts == [2]
    assert batch.embed_indices is not None
    assert batch.embed_indices.tolist() == [6, 7]
    assert rows.latest_input[[3, 1]].tolist() == [33, 31]


def test_a_step_that_only_decodes() -> None:
    rows = BatchRows(max_rows=3, max_pages=8, max_len=32, vocab_size=50)
    rows.last_token[:] = torch.tensor([30, 31, 32, 0])
    plan = StepPlan(
        rows=np.array([2, 0]),
        num_decodes=2,
        start_lens=np.array([6, 7]),
        query_lens=np.ones(2, dtype=np.int64),
        chunk_tokens=np.empty(0, dtype=np.int32),
        samples=np.ones(2, dtype=bool),
    )
    batch = build_batch(plan, rows, PAGE, [], ReferenceAttention())
    assert batch.input_ids.tolist() == [32, 30]
    assert (batch.num_decodes, batch.logits_indices) == (2, None)
    assert batch.positions.tolist() == [6, 7]
