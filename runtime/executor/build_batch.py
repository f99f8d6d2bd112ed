"""From a step's plan to the model's input."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from runtime.executor.batch_rows import BatchRows
from runtime.executor.staging import to_device
from runtime.executor.step_plan import StepPlan
from runtime.models.attention.backend import AttentionBackend
from runtime.models.forward_batch import ForwardBatch, HostLengths, KVCache


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
    is_decode = num_decodes == len(plan.rows)
    if is_decode:
        positions, token_rows = plan.start_lens, plan.rows
    else:
        token_rows = np.repeat(plan.rows, plan.query_lens)
        first = np.repeat(plan.start_lens - qo_indptr[:-1], plan.query_lens)
        positions = np.arange(int(qo_indptr[-1]), dtype=np.int64) + first
    pages = rows.page_table_host[token_rows, positions // page_size].astype(np.int64)
    row_index, positions_t, slots, indptr, lens, samples, chunk = to_device(
        rows.device,
        plan.rows,
        positions,
        pages * page_size + positions % page_size,
        qo_indptr,
        seq_lens.astype(np.int32),
        (qo_indptr[1:] - 1)[plan.samples].astype(np.int64),
        plan.chunk_tokens.astype(np.int64),
    )
    page_table = rows.page_table
    if rows.device.type == "cpu":
        # On a GPU rows of one length keep kernels from being compiled again for another stride.
        page_table = page_table[:, : -(-int(seq_lens.max()) // page_size)]
    embed_places, embeds = _given_embeds(plan, rows.device)
    decoding = rows.inputs(row_index[:num_decodes])
    rows.has_inputs = True
    return ForwardBatch(
        input_ids=decoding if is_decode else torch.cat([decoding, chunk]),
        positions=positions_t,
        slots=slots,
        qo_indptr=indptr,
        seq_lens=lens,
        page_table=page_table.index_select(0, row_index),
        num_decodes=num_decodes,
        logits_indices=None if len(samples) == qo_indptr[-1] else samples,
        kv=kv,
        attention=attention,
        whole_prompts=_whole_prompts(plan),
        host=(
            HostLengths(qo_indptr, seq_lens.astype(np.int32), rows.page_table_host[plan.rows])
            if attention.reads_host
            else None
        ),
        embed_places=embed_places,
        embeds=embeds,
    )


def _whole_prompts(plan: StepPlan) -> list[int]:
    """New tokens of the last sequences that have nothing cached; see `ForwardBatch`."""
    with_prefix = np.flatnonzero(plan.start_lens)
    first = max(plan.num_decodes, int(with_prefix[-1]) + 1 if len(with_prefix) else 0)
    lengths: list[int] = plan.query_lens[first:].tolist()
    return lengths


def _given_embeds(
    plan: StepPlan, device: torch.device
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    if not plan.embed_spans:
        return None, None
    places = [
        np.arange(span.length, dtype=np.int64) + (plan.num_decodes + span.first)
        for span in plan.embed_spans
    ]
    index_host = np.concatenate(places)
    data = bytearray().join(span.values for span in plan.embed_spans)
    values = np.frombuffer(data, dtype=np.float32).reshape(len(index_host), -1)
    index, embeds = to_device(device, index_host, values)
    return index, embeds
