"""Tracks which requests want which extra outputs, such as log-probabilities, and computes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor

from runtime.executor.staging import to_device
from runtime.extras.device_extras import DeviceExtra, Gathered, PromptPart, Reads, Samples
from runtime.requests.extra_spec import ExtraSpec, load_half
from runtime.step.step_plan import BoolArray, Int64Array, Reported, StepPlan

# The name of an extra output, and the values gathered for it.
Named = tuple[str, Gathered]


class RowExtras:
    """The extra outputs that the requests of the running batch want.

    Attributes:
        reads_hidden: `[num_rows]` bool on the host: rows with an extra output that is computed from
            the hidden state of a new token.
        reads_experts: `[num_rows]` bool on the host: rows with an extra output about the experts
            that tokens choose.
        reads_logits: `[num_rows]` bool on the host: rows with an extra output that is computed from
            logits.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        """Start with rows that want no extra outputs; their code is loaded at first use."""
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._send = partial(to_device, device)
        self._loaded: dict[str, DeviceExtra] = {}
        # For each extra output that was used: the rows that want it for their output tokens.
        self._asking: dict[str, BoolArray] = {}
        self.reads_hidden = np.zeros(num_rows, dtype=bool)
        self.reads_experts = np.zeros(num_rows, dtype=bool)
        self.reads_logits = np.zeros(num_rows, dtype=bool)

    def join(self, row: int, extras: list[ExtraSpec]) -> None:
        """Store the extra outputs of a request that takes a row."""
        for reads in (self.reads_hidden, self.reads_experts, self.reads_logits):
            reads[row] = False
        for asking in self._asking.values():
            asking[row] = False
        for spec in extras:
            extra = self._load(spec.name)
            extra.join(row, spec.params)
            if spec.of_outputs:
                self._asking[spec.name][row] = True
                readers = self._readers(extra.reads)
                if readers is not None:
                    readers[row] = True

    def _readers(self, reads: Reads) -> BoolArray | None:
        match reads:
            case "hidden":
                return self.reads_hidden
            case "experts":
                return self.reads_experts
            case "raw_logits" | "logits":
                return self.reads_logits
            case "pooled":
                # The encoder's runner computes this output for all rows.
                return None

    def _load(self, name: str) -> DeviceExtra:
        if name not in self._loaded:
            self._loaded[name] = cast("type[DeviceExtra]", load_half(name, "device"))()
            self._asking[name] = np.zeros(self._num_rows, dtype=bool)
        return self._loaded[name]

    def device_half(self, name: str) -> DeviceExtra | None:
        """Return what computes the extra output `name`; `None` if no request has used it yet."""
        return self._loaded.get(name)

    def of_samples(
        self,
        reads: Reads,
        rows: Int64Array,
        values: Tensor,
        temperature: np.float32 | np.ndarray = np.float32(1),
        token_ids: Tensor | None = None,
    ) -> list[Named]:
        """Compute the extra outputs of a step's new tokens from one kind of values.

        Args:
            reads: the kind of `values`; extra outputs that read another kind are skipped.
            rows: `[num_samples]` int64 on the host, the row of each new token.
            values: `[num_samples, ...]` on the device, not changed.
            temperature: `[num_samples]` float32 on the host, 1 for greedy rows; by default 1 for
                all.
            token_ids: `[num_samples]` int64, the new tokens, if they are known.
        """
        found: list[Named] = []
        for name, extra in self._loaded.items():
            if extra.reads != reads:
                continue
            sample_indices = np.flatnonzero(self._asking[name][rows])
            if not len(sample_indices):
                continue
            (index,) = self._send(sample_indices)
            samples = Samples(
                rows[sample_indices],
                values.index_select(0, index),
                None if token_ids is None else token_ids.index_select(0, index),
                np.broadcast_to(temperature, len(rows))[sample_indices],
                self._send,
            )
            found.append((name, extra.of_samples(samples)))
        return found

    def of_prompts(
        self,
        plan: StepPlan,
        hidden: Tensor,
        compute_logits: Callable[[Tensor], Tensor],
        expert_ids: Tensor | None = None,
    ) -> list[Named]:
        """Compute the extra outputs of the prompt positions that a step's plan lists.

        Args:
            plan: the step's plan.
            hidden: `[num_tokens, hidden_size]`, the hidden state of each token of the step.
            compute_logits: the model's output head.
            expert_ids: `[num_tokens, layers with experts, chosen]`, if a row needs them.
        """
        found: list[Named] = []
        firsts = np.cumsum(plan.query_lens) - plan.query_lens
        for span in plan.report_spans:
            begin = int(firsts[span.index]) + span.offset
            inside = slice(begin, begin + len(span.next_tokens))
            part = PromptPart(
                int(plan.rows[span.index]),
                hidden[inside],
                span.next_tokens,
                compute_logits,
                self._vocab_size,
                self._send,
                None if expert_ids is None else expert_ids[inside],
            )
            found.append((span.extra, self._loaded[span.extra].of_prompt(part)))
        return found


def reported(named: list[Named]) -> list[tuple[int, Reported]]:
    """Return the gathered outputs with their rows.

    The outputs must have been copied to the host.
    """
    return [
        (row, Reported(name, num_positions, data))
        for name, gathered in named
        for row, num_positions, data in gathered.blocks()
    ]
