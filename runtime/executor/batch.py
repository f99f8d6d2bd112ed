"""From a step's plan to the model's input."""

from __future__ import annotations

import numpy as np
import torch

from runtime.attention.backend import AttentionBackend
from runtime.batch_rows import BatchRows
from runtime.step import StepPlan
from runtime.forward_batch import ForwardBatch, KVCache


def build_batch(
    plan: StepPlan,
    rows: BatchRows,
    page_size: int,
    kv: list[KVCache],
    attention: AttentionBackend,
) -> ForwardBatch:
    """Flatten the plan's sequences; numbers are made on the host by whole-array operations."""
    num_decodes = plan.num_decodes
    seq_lens = plan.start_lens + plan.query_lens
    qo_indptr = np.zeros(len(plan.rows) + 1, dtype=np.int32)
    np.cumsum(plan.query_lens, out=qo_indptr[1:])
    decoding = rows.last_token[torch.from_numpy(plan.rows[:num_decodes])]
    if num_decodes == len(plan.rows):
        positions, token_rows, input_ids = plan.start_lens, plan.rows, decoding
    else:
        num_tokens = int(qo_indptr[-1])
        token_rows = np.repeat(plan.rows, plan.query_lens)
        first = np.repeat(plan.start_lens - qo_indptr[:-1], plan.query_lens)
        positions = np.arange(num_tokens, dtype=np.int64) + first
        chunk = torch.from_numpy(plan.chunk_tokens.astype(np.int64))
        input_ids = torch.cat([decoding, chunk])
    table = rows.page_table_host
    pages = table[token_rows, positions // page_size].astype(np.int64)
    num_pages = -(-int(seq_lens.max()) // page_size)
    return ForwardBatch(
        input_ids=input_ids,
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(pages * page_size + positions % page_size),
        qo_indptr=torch.from_numpy(qo_indptr),
        seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
        page_table=torch.from_numpy(np.ascontiguousarray(table[plan.rows, :num_pages])),
        num_decodes=num_decodes,
        logits_indices=torch.from_numpy((qo_indptr[1:] - 1)[plan.samples].astype(np.int64)),
        kv=kv,
        attention=attention,
    )
