"""Builds the model's input from a step's plan: arrays on the host, tensors, then the batch.

A step without a CUDA graph sends the arrays as they are. A graph with prompts reads them from a
buffer in host memory, padded to the graph's size (`runtime.executor.graph_inputs`).
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.executor.batch_rows import BatchRows
from runtime.executor.image_store import ImageStore
from runtime.executor.staging import to_device
from runtime.models.attention.backend import AttentionBackend
from runtime.models.attention.forward_batch import ForwardBatch, HostLengths, KVCache, StateSteps
from runtime.step.step_plan import Int32Array, Int64Array, StateMoves, StepPlan


def key_ends(plan: StepPlan, known: NDArray[np.intp], indptr: NDArray[Any]) -> Int32Array:
    """Return `[num_tokens]` int32: for each token of a step, the number of keys that it attends to.

    A text token attends to the keys up to its own. An image token attends to all keys of its image,
    because attention within such images is bidirectional.

    Args:
        plan: the step's plan. If it has tokens of an image, it has all remaining tokens of that
            image.
        known: index in the step of each token of `plan.chunk_tokens`.
        indptr: `[num_seqs + 1]`, where each sequence's tokens begin and end.
    """
    ahead = np.repeat(plan.start_lens - indptr[:-1], plan.query_lens)
    ends = (np.arange(1, plan.num_tokens + 1) + ahead).astype(np.int32)
    for span in plan.image_spans:
        token_indices = known[span.first : span.first + span.length]
        ends[token_indices] = ends[token_indices[-1]]
    return ends


_NO_IDS: Int64Array = np.zeros(0, dtype=np.int64)

ArrayT = TypeVar("ArrayT", NDArray[Any], Tensor)


class FlatStep(NamedTuple, Generic[ArrayT]):
    """The sequences of a step, concatenated: integers on the host or on the device.

    Attributes:
        known_ids: `[num_tokens]`, the id of each token. -1 for the next input of a decoding row,
            which only the device knows. Empty if all are -1.
        token_rows: `[num_tokens]`, the batch row of each token.
        positions: `[num_tokens]`, the RoPE position of each token: its index in the sequence, or
            the position from `RopeRows`.
        slots: `[num_tokens]`, where each token's key and value are written: `page * page_size +
            offset`.
        rows: `[num_seqs]`, the batch row of each sequence.
        seq_lens: `[num_seqs]`, number of keys of each sequence after this step.
        qo_indptr: `[num_seqs + 1]`, where each sequence's tokens begin and end.
        last: `[num_seqs]`, index of each sequence's last token.
    """

    known_ids: ArrayT
    token_rows: ArrayT
    positions: ArrayT
    slots: ArrayT
    rows: ArrayT
    seq_lens: ArrayT
    qo_indptr: ArrayT
    last: ArrayT


def flatten(plan: StepPlan, rows: BatchRows, page_size: int) -> FlatStep[NDArray[Any]]:
    """Return the sequences of a plan, concatenated, as arrays on the host."""
    num_seqs, num_tokens = len(plan.rows), plan.num_tokens
    indptr = np.zeros(num_seqs + 1, dtype=np.int32)
    np.cumsum(plan.query_lens, out=indptr[1:])
    token_rows, positions = plan.rows, plan.start_lens
    if num_tokens > num_seqs:
        token_rows = np.repeat(plan.rows, plan.query_lens)
        first = np.repeat(plan.start_lens - indptr[:-1], plan.query_lens)
        positions = np.arange(num_tokens, dtype=np.int64) + first
    known_ids = plan.known_ids if len(plan.chunk_tokens) else _NO_IDS
    pages = rows.page_table_host[token_rows, positions // page_size].astype(np.int64)
    slots = pages * page_size + positions % page_size
    if rows.rope is not None:
        positions = rows.rope.shift(plan, positions, token_rows, indptr)
    return FlatStep(
        known_ids=known_ids,
        token_rows=token_rows,
        positions=positions,
        slots=slots,
        rows=plan.rows,
        seq_lens=(plan.start_lens + plan.query_lens).astype(np.int32),
        qo_indptr=indptr,
        last=(indptr[1:] - 1).astype(np.int64),
    )


def as_batch(
    step: FlatStep[Tensor],
    rows: BatchRows,
    kv: list[KVCache],
    attention: AttentionBackend,
    *,
    has_decodes: bool,
    num_decodes: int | None,
    num_pages: int | None = None,
    states: StateSteps | None = None,
) -> ForwardBatch:
    """Build the model's input from a step on the device, without waiting for the device.

    Args:
        step: the step. The block tables of its rows are on the device, too.
        rows: the rows of the running batch.
        kv: the KV cache, one entry per layer.
        attention: the attention back end, which plans the batch later.
        has_decodes: whether any row may decode; if not, all token ids are known.
        num_decodes: number of sequences with exactly one new token at the start of the batch;
            `None` if only the device knows it.
        num_pages: number of pages of each row that the step may read; all by default.
        states: the slots where recurrent states are read and written; `None` if the model has none.
    """
    input_ids = step.known_ids
    if has_decodes:
        input_ids = rows.inputs(step.token_rows)
        if len(step.known_ids):
            input_ids = torch.where(step.known_ids < 0, input_ids, step.known_ids)
    page_table = rows.page_table[:, :num_pages].index_select(0, step.rows)
    return ForwardBatch(
        input_ids=input_ids,
        positions=step.positions,
        slots=step.slots,
        qo_indptr=step.qo_indptr.to(torch.int32),
        seq_lens=step.seq_lens.to(torch.int32),
        page_table=page_table,
        num_decodes=num_decodes,
        logits_indices=step.last,
        kv=kv,
        attention=attention,
        adapters=rows.begin_adapters(step.token_rows),
        states=states,
        window=None if rows.windows is None else rows.windows.view(page_table, step.slots),
    )


def build_batch(
    plan: StepPlan,
    rows: BatchRows,
    page_size: int,
    kv: list[KVCache],
    attention: AttentionBackend,
    images: ImageStore | None = None,
) -> ForwardBatch:
    """Send a step to the device and build the model's input there.

    Args:
        plan: the step's plan.
        rows: the rows of the running batch.
        page_size: number of tokens per page.
        kv: the KV cache, one entry per layer.
        attention: the attention back end, which plans the batch later.
        images: the vectors of images; `None` if the model takes none.
    """
    flat = flatten(plan, rows, page_size)
    wanted = flat._replace(last=flat.last[plan.samples])
    # On a GPU all pages are passed, because kernels are compiled again for another row length.
    is_cpu = rows.device.type == "cpu"
    batch = as_batch(
        FlatStep(*to_device(rows.device, *wanted)),
        rows,
        kv,
        attention,
        has_decodes=plan.num_decodes > 0,
        num_decodes=_num_single(plan),
        num_pages=-(-int(flat.seq_lens.max()) // page_size) if is_cpu else None,
        states=state_steps(plan, flat.qo_indptr, kv, rows.device),
    )
    rows.has_inputs = True
    if len(wanted.last) == plan.num_tokens:
        batch.logits_indices = None
    if len(plan.rows) > plan.num_decodes:
        batch.whole_prompts = _whole_prompts(plan)
    if attention.reads_host:
        pages = rows.page_table_host[plan.rows]
        window_table = None if rows.windows is None else rows.windows.host[pages]
        batch.host = HostLengths(flat.qo_indptr, flat.seq_lens, pages, window_table)
    if plan.embed_spans:
        batch.embed_indices, batch.embeds = _given_embeds(plan, flat, rows.device)
    if plan.image_spans and images is not None:
        known = np.flatnonzero(flat.known_ids >= 0)
        batch.images = images.tokens_of(plan, known)
        if images.is_bidirectional:
            ends = key_ends(plan, known, flat.qo_indptr)
            (batch.key_ends,) = to_device(rows.device, ends)
        if rows.rope is not None:
            axes = rows.rope.axes(plan, flat.positions, flat.qo_indptr)
            (batch.rope_axes,) = to_device(rows.device, axes)
    return batch


def padding_state(kv: list[KVCache]) -> int | None:
    """Return the slot of recurrent states that padding writes to; `None` if there are none."""
    return next((len(layer.states[0]) - 1 for layer in kv if layer.states), None)


def state_steps(
    plan: StepPlan, indptr: NDArray[Any], kv: list[KVCache], device: torch.device
) -> StateSteps | None:
    """Send the slots at which a step reads and writes recurrent states to the device.

    Returns:
        The slots; `None` if the model has no recurrent states.
    """
    padding_slot = padding_state(kv)
    if padding_slot is None:
        return None
    moves = plan.states
    if moves is None:
        # A warm-up step: it begins with zeros, and its final states are not used.
        seqs = np.arange(len(plan.rows), dtype=np.int32)
        padding = np.full(len(seqs), padding_slot, dtype=np.int32)
        moves = StateMoves(np.zeros_like(seqs), seqs, plan.query_lens.astype(np.int32), padding)
    seqs = moves.save_seqs.astype(np.int64)
    bounds = np.searchsorted(seqs, np.arange(len(plan.rows) + 1)).astype(np.int32)
    ends = indptr[seqs] + moves.save_lens.astype(np.int64)
    sent = to_device(
        device,
        moves.reads.astype(np.int64),
        bounds,
        ends,
        seqs,
        moves.save_slots.astype(np.int64),
    )
    return StateSteps(*sent, is_decode=plan.num_tokens == len(plan.rows))


def _num_single(plan: StepPlan) -> int:
    """Return how many sequences, counted from the first, decode exactly one token."""
    if plan.num_tokens == plan.num_decodes:
        return plan.num_decodes
    is_several = plan.query_lens[: plan.num_decodes] > 1
    return int(is_several.argmax()) if is_several.any() else plan.num_decodes


def _whole_prompts(plan: StepPlan) -> list[int]:
    """Return the lengths of the prompts without cached tokens at the end of the batch."""
    with_prefix = np.flatnonzero(plan.start_lens)
    first = max(plan.num_decodes, int(with_prefix[-1]) + 1 if len(with_prefix) else 0)
    lengths: list[int] = plan.query_lens[first:].tolist()
    return lengths


def _given_embeds(
    plan: StepPlan, flat: FlatStep[NDArray[Any]], device: torch.device
) -> tuple[Tensor, Tensor]:
    known = np.flatnonzero(flat.known_ids >= 0)
    token_indices = [known[span.first : span.first + span.length] for span in plan.embed_spans]
    index_host = np.concatenate(token_indices)
    data = bytearray().join(span.values for span in plan.embed_spans)
    values = np.frombuffer(data, dtype=np.float32).reshape(len(index_host), -1)
    index, embeds = to_device(device, index_host, values)
    return index, embeds
