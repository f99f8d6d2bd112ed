"""Builds the model's input from a step's plan: host arrays, then tensors, then the batch.

Steps without a graph send the arrays as they are. A graph with prompts reads them from a buffer of
host memory, padded to its size (`runtime.executor.graph_inputs`).
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
    """Return `[num_tokens]`, see `ForwardBatch.key_ends`.

    Args:
        plan: the step. If it has tokens of an image, it has all of that image's remaining tokens.
        known: index in the step of each of `plan.chunk_tokens`.
        indptr: `[num_seqs + 1]`, bounds of each sequence's tokens.
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
    """A step's sequences, concatenated; integers on the host or on the device.

    Attributes:
        known_ids: `[num_tokens]`, each token, or -1 for its row's next input, which is on the
            device; empty if all are -1.
        token_rows: `[num_tokens]`, the row of each token.
        positions: `[num_tokens]`, each token's position for RoPE, which is its index in the
            sequence or what `RopeRows` gives.
        slots: `[num_tokens]`, `page * page_size + offset` of each token.
        rows: `[num_seqs]`, the row of each sequence.
        seq_lens: `[num_seqs]`, keys of each sequence after this step's keys are written.
        qo_indptr: `[num_seqs + 1]`, bounds of each sequence's tokens.
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
    """Flatten the plan's sequences with whole-array operations on the host."""
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
    """Build the model's input from a step that is on the device; does not wait.

    Args:
        step: the step, on the device, which also has the pages of its rows.
        rows: rows of the running batch.
        kv: key and value pages, one entry per layer.
        attention: plans the batch later.
        has_decodes: whether any row may decode; if not, all tokens are known.
        num_decodes: see `ForwardBatch`.
        num_pages: how many pages of each row are enough for the step; all by default.
        states: see `ForwardBatch`.
    """
    input_ids = step.known_ids
    if has_decodes:
        input_ids = rows.inputs(step.token_rows)
        if len(step.known_ids):
            input_ids = torch.where(step.known_ids < 0, input_ids, step.known_ids)
    return ForwardBatch(
        input_ids=input_ids,
        positions=step.positions,
        slots=step.slots,
        qo_indptr=step.qo_indptr.to(torch.int32),
        seq_lens=step.seq_lens.to(torch.int32),
        page_table=rows.page_table[:, :num_pages].index_select(0, step.rows),
        num_decodes=num_decodes,
        logits_indices=step.last,
        kv=kv,
        attention=attention,
        adapters=rows.begin_adapters(step.token_rows),
        states=states,
    )


def build_batch(
    plan: StepPlan,
    rows: BatchRows,
    page_size: int,
    kv: list[KVCache],
    attention: AttentionBackend,
    images: ImageStore | None = None,
) -> ForwardBatch:
    """Send a step to the device and build the model's input, with the vectors of `images`."""
    flat = flatten(plan, rows, page_size)
    wanted = flat._replace(last=flat.last[plan.samples])
    # On a GPU, rows of a fixed length avoid recompiling kernels for another stride.
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
        batch.host = HostLengths(flat.qo_indptr, flat.seq_lens, pages)
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
    """Return the slot of recurrent states that padding writes; `None` if there are none."""
    return next((len(layer.states[0]) - 1 for layer in kv if layer.states), None)


def state_steps(
    plan: StepPlan, indptr: NDArray[Any], kv: list[KVCache], device: torch.device
) -> StateSteps | None:
    """Send the places of recurrent states to the device; `None` if the model has none."""
    padding_slot = padding_state(kv)
    if padding_slot is None:
        return None
    moves = plan.states
    if moves is None:
        # A made-up step: it begins with zeros, and nothing reads what it leaves.
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
    """Return how many sequences, counted from the first, decode one token."""
    if plan.num_tokens == plan.num_decodes:
        return plan.num_decodes
    is_several = plan.query_lens[: plan.num_decodes] > 1
    return int(is_several.argmax()) if is_several.any() else plan.num_decodes


def _whole_prompts(plan: StepPlan) -> list[int]:
    """Return the lengths of the last sequences without cached tokens; see `ForwardBatch`."""
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
