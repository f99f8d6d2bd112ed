"""Records decode steps on a CPU, and repeats them without the model's Python code.

A recorded step reads its inputs from tensors whose addresses stay the same. Each number of
sequences has its own recording, and another one for steps with adapters. A recording is used only
if its first repetition gives the same bits as the model's own code. So layers that branch on the
values of tensors run without a recording.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.cpu.library import unavailable
from runtime.executor.batch_rows import BatchRows
from runtime.models.attention.forward_batch import ForwardBatch, WindowView
from runtime.models.model import CausalLM
from runtime.step.step_plan import StepPlan

if TYPE_CHECKING:
    from kernels.cpu.recording import Recording

logger = logging.getLogger(__name__)

# With more sequences, the kernels of a step take much longer than the Python code between them.
MAX_SEQS = 32


@dataclass
class _Recorded:
    """A recorded step.

    Attributes:
        batch: its input.
        slots: the adapter slots of its tokens; `None` if no token uses an adapter.
        recording: the recorded work, which can be repeated; `None` if the step cannot be recorded.
        is_checked: whether a repetition was compared with the model.
    """

    batch: ForwardBatch
    slots: Tensor | None
    recording: Recording | None
    is_checked: bool = False


class RecordedSteps:
    """Computes the layers of steps; small decode steps are computed by repeating recordings.

    Attributes:
        num_repeats: number of steps that were repeated from a recording.
    """

    def __init__(self, model: CausalLM, rows: BatchRows, *, is_on: bool) -> None:
        """Start without recordings.

        Args:
            model: the loaded model.
            rows: the rows of the running batch.
            is_on: whether steps may be recorded, if the device and the model allow it.
        """
        self._model = model
        self._max_pages = rows.page_table.shape[1]
        self._is_on = is_on and rows.device.type == "cpu" and unavailable() is None
        # By the number of sequences, and whether any of them uses an adapter.
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        self.num_repeats = 0

    def forget(self) -> None:
        """Drop all recordings, because weights or the KV cache get other memory."""
        self._recorded.clear()

    def can_repeat(self, plan: StepPlan, batch: ForwardBatch) -> bool:
        """Whether a recording can compute a step: each sequence decodes one token, nothing else."""
        special = batch.states, batch.images, batch.rope_axes, batch.embed_indices
        return (
            self._is_on
            and self._model.is_recordable
            and plan.num_tokens == plan.num_decodes == len(plan.rows) <= MAX_SEQS
            and batch.logits_indices is None
            and all(each is None for each in special)
            and not batch.attention.reads_host
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Compute the layers of a step for which `can_repeat` is true.

        The result is that of `CausalLM.forward`.
        """
        slots = _slots_of(batch)
        key = len(batch.input_ids), slots is not None
        known = self._recorded.get(key)
        if known is None:
            return self._record(key, batch, slots)
        if known.recording is None:
            return self._model.forward(batch)
        _copy_inputs(batch, known.batch)
        if slots is not None and known.slots is not None:
            known.slots.copy_(slots)
        known.recording.repeat()
        self.num_repeats += 1
        # The next step overwrites the recording's result.
        result = known.recording.result.clone()
        if known.is_checked:
            return result
        plain = self._model.forward(batch)
        known.is_checked = True
        if not torch.equal(result.view(torch.uint8), plain.view(torch.uint8)):
            logger.warning("A repeated decode step differs; such steps run without a recording")
            known.recording = None
        return plain

    def _record(self, key: tuple[int, bool], batch: ForwardBatch, slots: Tensor | None) -> Tensor:
        from kernels.cpu.recording import record

        own = self._own_inputs(batch)
        if slots is not None and own.adapters is not None:
            slots = slots.clone()
            own.adapters.begin(slots)
        result, recording, why = record(lambda: self._model.forward(own))
        if recording is None:
            logger.info("Decode steps of %d sequences are not recorded: %s", key[0], why)
        self._recorded[key] = _Recorded(own, slots, recording)
        return result.clone()

    def _own_inputs(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a copy of a batch in memory of its own, with room for the longest sequences."""

        def table(pages: Tensor) -> Tensor:
            return pages.new_zeros(len(pages), self._max_pages)

        window = batch.window
        own = replace(
            batch,
            input_ids=batch.input_ids.clone(),
            positions=batch.positions.clone(),
            slots=batch.slots.clone(),
            qo_indptr=batch.qo_indptr.clone(),
            seq_lens=batch.seq_lens.clone(),
            page_table=table(batch.page_table),
            window=None
            if window is None
            else WindowView(table(window.page_table), window.slots.clone()),
        )
        _copy_inputs(batch, own)
        return own


def _slots_of(batch: ForwardBatch) -> Tensor | None:
    """Return the adapter slots of a step's tokens; `None` if no token uses an adapter."""
    adapters = batch.adapters
    return adapters.tokens.slots if adapters is not None and adapters.is_on else None


def _copy_inputs(source: ForwardBatch, to: ForwardBatch) -> None:
    """Copy the inputs that differ between decode steps with the same number of sequences."""
    to.input_ids.copy_(source.input_ids)
    to.positions.copy_(source.positions)
    to.slots.copy_(source.slots)
    to.seq_lens.copy_(source.seq_lens)
    to.page_table[:, : source.page_table.shape[1]].copy_(source.page_table)
    if source.window is not None and to.window is not None:
        pages = source.window.page_table
        to.window.page_table[:, : pages.shape[1]].copy_(pages)
        to.window.slots.copy_(source.window.slots)
