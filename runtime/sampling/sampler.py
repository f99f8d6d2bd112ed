"""Applies each row's penalties, masks and biases, then samples the whole batch at once."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from kernels.sampling import (
    SamplingRows,
    apply_logit_bias,
    apply_penalties,
    mask_tokens,
    nan_rows,
    sample,
)
from runtime.batch_rows import BatchRows
from runtime.step import Int64Array

NAN_MESSAGE = "The model produced NaN logits for this request."


class Sampler:
    """Samples rows of `BatchRows`; keeps no state of its own."""

    def __init__(self, rows: BatchRows) -> None:
        """Read parameters from `rows`."""
        self._rows = rows

    def sample(
        self, logits: Tensor, rows: Int64Array, positions: Int64Array
    ) -> tuple[Tensor, dict[int, str]]:
        """Choose the next token of each row.

        Args:
            logits: `[num_samples, vocab_size]` float32, changed in place.
            rows: `[num_samples]`, the row of each line of `logits`.
            positions: `[num_samples]`, index in its sequence of each token to be sampled.

        Returns:
            `[num_samples]` int64 token ids, and the rows that failed with the reason.
        """
        state = self._rows
        if state.is_special[rows].any():
            self._edit_logits(logits, rows, positions)
        if state.is_greedy[rows].all():
            best = logits.max(dim=-1)
            token_ids, bad = best.indices, torch.isnan(best.values)
        else:
            bad = nan_rows(logits)
            token_ids = sample(logits, self._sampling_rows(rows, positions))
        if bool(bad.any()):
            return token_ids, {int(rows[i]): NAN_MESSAGE for i in bad.nonzero().flatten().tolist()}
        return token_ids, {}

    def _sampling_rows(self, rows: Int64Array, positions: Int64Array) -> SamplingRows:
        state = self._rows
        index = torch.from_numpy(rows)
        params = state.params.index_select(0, index)
        top_k = state.top_k.index_select(0, index)
        wanted = top_k[top_k < state.vocab_size]
        return SamplingRows(
            temperature=params[:, state.TEMPERATURE].contiguous(),
            top_k=top_k,
            top_p=params[:, state.TOP_P].contiguous(),
            min_p=params[:, state.MIN_P].contiguous(),
            seed=state.seeds.index_select(0, index),
            position=torch.from_numpy(positions),
            all_greedy=False,
            any_top_k=len(wanted) > 0,
            any_top_p=bool((params[:, state.TOP_P] < 1).any()),
            any_min_p=bool((params[:, state.MIN_P] > 0).any()),
            max_top_k=int(wanted.max()) if len(wanted) else 0,
        )

    def _edit_logits(self, logits: Tensor, rows: Int64Array, positions: Int64Array) -> None:
        state = self._rows
        mask_rows: list[int] = []
        mask_ids: list[int] = []
        bias_rows: list[int] = []
        bias_ids: list[int] = []
        bias_values: list[float] = []
        penalised: list[int] = []
        num_outputs = positions - state.num_prompt[rows]
        for line in np.flatnonzero(state.is_special[rows]).tolist():
            row = int(rows[line])
            sampling = state.sampling[row]
            assert sampling is not None
            if sampling.has_penalties:
                penalised.append(line)
            if num_outputs[line] < sampling.min_new_tokens:
                mask_rows += [line] * len(state.stop_ids[row])
                mask_ids += state.stop_ids[row]
            bias_rows += [line] * len(sampling.logit_bias)
            bias_ids += sampling.logit_bias.keys()
            bias_values += sampling.logit_bias.values()
        if penalised:
            self._penalise(logits, rows, num_outputs, penalised)
        if mask_ids:
            mask_tokens(logits, torch.tensor(mask_rows), torch.tensor(mask_ids))
        if bias_ids:
            apply_logit_bias(
                logits,
                torch.tensor(bias_rows),
                torch.tensor(bias_ids),
                torch.tensor(bias_values, dtype=torch.float32),
            )

    def _penalise(
        self, logits: Tensor, rows: Int64Array, num_outputs: Int64Array, lines: list[int]
    ) -> None:
        state = self._rows
        line_index = torch.tensor(lines)
        row_index = torch.from_numpy(rows[lines])
        lengths = torch.from_numpy(num_outputs[lines])
        most = int(lengths.max())
        if most == 0:
            return
        params = state.params.index_select(0, row_index)
        part = logits.index_select(0, line_index)
        apply_penalties(
            part,
            state.history()[row_index, :most],
            lengths,
            params[:, state.FREQUENCY].contiguous(),
            params[:, state.PRESENCE].contiguous(),
            params[:, state.REPETITION].contiguous(),
        )
        logits.index_copy_(0, line_index, part)

    def remember(self, token_ids: Tensor, rows: Int64Array, positions: Int64Array) -> None:
        """Note sampled tokens: input of the next step, and history for penalties."""
        state = self._rows
        index = torch.from_numpy(rows)
        state.last_token[index] = token_ids
        lines = np.flatnonzero(state.has_penalties[rows])
        if len(lines):
            places = torch.from_numpy((positions - state.num_prompt[rows])[lines])
            state.history()[index[lines], places] = token_ids[lines]

