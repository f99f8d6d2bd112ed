"""Applies penalties, grammar masks and biases to logits, then samples a token for each sequence.

Nothing here waits for the device. Sampling parameters are kept on the host and sent with each use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from kernels.greedy import NAN_TOKEN
from kernels.sampling import (
    SamplingRows,
    apply_logit_bias,
    apply_penalties,
    apply_token_bitmask,
    best_tokens,
    mask_tokens,
    nan_rows,
    sample,
)
from runtime.executor.batch_rows import BatchRows
from runtime.executor.row_extras import Named
from runtime.executor.staging import to_device
from runtime.step.step_plan import Int64Array, TokenMasks


class Sampled(NamedTuple):
    """The result of sampling.

    Attributes:
        token_ids: `[num_samples]` int64 on the device; `NAN_TOKEN` for rows with NaN logits.
        extras: the extra outputs about the tokens that are computed from logits.
    """

    token_ids: Tensor
    extras: list[Named]


class Sampler:
    """Samples the next tokens of rows of the running batch; has no state of its own."""

    def __init__(self, rows: BatchRows, share: Callable[[Tensor], Tensor] | None = None) -> None:
        """Create a sampler that uses the parameters in `rows`.

        If several ranks sample, `share` replaces the tokens by those of one rank.
        """
        self._rows = rows
        self._share = share

    def sample(
        self,
        logits: Tensor,
        rows: Int64Array,
        positions: Int64Array,
        masks: TokenMasks | None = None,
    ) -> Sampled:
        """Choose the next token of each row, and store it as the row's next input.

        Args:
            logits: `[num_samples, vocab_size]` float32, changed in place.
            rows: `[num_samples]` int64, the row of each sample.
            positions: `[num_samples]` int64, the index of each new token in its sequence.
            masks: grammar masks for samples whose output follows a grammar.
        """
        state = self._rows
        is_greedy = state.is_greedy[rows].all()
        params = None
        if is_greedy:
            (index,) = to_device(state.device, rows)
        else:
            index, params = self._sampling_rows(rows, positions)
        extras, found = state.extras, []
        is_read = extras.reads_logits[rows].any()
        if is_read:
            found = extras.of_samples("raw_logits", rows, logits)
        edits = state.edits_logits[rows].any()
        if edits or (masks is not None and (is_read or not is_greedy)):
            self._edit_logits(logits, rows, index, positions, masks)
            masks = None
        if params is None:
            token_ids = best_tokens(logits, *self._on_device(logits, masks))
        else:
            bad = nan_rows(logits)
            token_ids = sample(logits, params)
            token_ids = token_ids.masked_fill(bad, NAN_TOKEN)
        if self._share is not None:
            token_ids = self._share(token_ids)
        self._remember(token_ids, rows, index, positions)
        if is_read:
            temperature = state.params[rows, state.TEMPERATURE]
            temperature = np.where(state.is_greedy[rows], np.float32(1), temperature)
            found += extras.of_samples("logits", rows, logits, temperature, token_ids)
        return Sampled(token_ids, found)

    def is_plain(self, rows: Int64Array) -> bool:
        """Whether each row takes the token with the largest logit, and nothing else uses logits."""
        state = self._rows
        edited = state.edits_logits[rows] | state.has_grammar[rows]
        edited |= state.extras.reads_logits[rows]
        return bool(state.is_greedy[rows].all()) and not edited.any()

    def _sampling_rows(
        self, rows: Int64Array, positions: Int64Array
    ) -> tuple[Tensor, SamplingRows]:
        """Send `rows` and their sampling parameters to the device."""
        state = self._rows
        params, top_k = state.params[rows], state.top_k[rows]
        limits = top_k[top_k < state.vocab_size]
        columns = [
            params[:, which].copy() for which in (state.TEMPERATURE, state.TOP_P, state.MIN_P)
        ]
        index, position, seed, top_k_sent, temperature, top_p, min_p = to_device(
            state.device, rows, positions, state.seeds[rows], top_k, *columns
        )
        return index, SamplingRows(
            temperature=temperature,
            top_k=top_k_sent,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            position=position,
            all_greedy=False,
            any_top_k=len(limits) > 0,
            any_top_p=bool((params[:, state.TOP_P] < 1).any()),
            max_top_k=int(limits.max()) if len(limits) else 0,
        )

    def _edit_logits(
        self,
        logits: Tensor,
        rows: Int64Array,
        index: Tensor,
        positions: Int64Array,
        masks: TokenMasks | None,
    ) -> None:
        state = self._rows
        too_early: list[tuple[int, int]] = []
        biased: list[tuple[int, int]] = []
        num_outputs = positions - state.num_prompt[rows]
        masked: frozenset[int] = (
            frozenset() if masks is None else frozenset(masks.sample_indices.tolist())
        )
        for sample_index in np.flatnonzero(state.has_token_rules[rows]).tolist():
            row = int(rows[sample_index])
            sampling = state.sampling[row]
            assert sampling is not None
            # Rows with a grammar are skipped: the grammar's mask takes the minimum length into
            # account, and allows the end if nothing else is possible.
            if num_outputs[sample_index] < sampling.min_new_tokens and sample_index not in masked:
                too_early += [(sample_index, token_id) for token_id in state.stop_ids[row]]
            if sampling.logit_bias:
                biased.append((sample_index, row))
        penalised = np.flatnonzero(state.has_penalties[rows])
        if len(penalised):
            self._penalise(logits, rows, index, num_outputs, penalised)
        if too_early:
            pairs = np.array(too_early, dtype=np.int64)
            sample_indices, ids = to_device(state.device, pairs[:, 0].copy(), pairs[:, 1].copy())
            mask_tokens(logits, sample_indices, ids)
        if masks is not None:
            words, masked_samples = self._on_device(logits, masks)
            assert words is not None
            apply_token_bitmask(logits, words, masked_samples)
        # Biases come after the masks: the logit of a forbidden token stays minus infinity.
        if biased:
            ids_of, values_of = zip(*(state.biases[row] for _, row in biased), strict=True)
            counts = [len(ids) for ids in ids_of]
            sample_indices, ids, added = to_device(
                state.device,
                np.repeat(
                    np.array([sample_index for sample_index, _ in biased], dtype=np.int64), counts
                ),
                np.concatenate(ids_of),
                np.concatenate(values_of),
            )
            apply_logit_bias(logits, sample_indices, ids, added)

    def _on_device(
        self, logits: Tensor, masks: TokenMasks | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send masks to the device; return them and the indices of their samples.

        The indices are `None` if every sample has a mask.
        """
        if masks is None:
            return None, None
        device = self._rows.device
        if len(masks.sample_indices) == len(logits):
            (words,) = to_device(device, masks.words)
            return words, None
        words, sample_indices = to_device(device, masks.words, masks.sample_indices)
        return words, sample_indices

    def _penalise(
        self,
        logits: Tensor,
        rows: Int64Array,
        index: Tensor,
        num_outputs: Int64Array,
        penalised: Int64Array,
    ) -> None:
        state = self._rows
        most = int(num_outputs[penalised].max())
        if most == 0:
            return
        params = state.params[rows[penalised]]
        columns = (state.FREQUENCY, state.PRESENCE, state.REPETITION)
        sample_indices, lengths, frequency, presence, repetition = to_device(
            state.device,
            penalised,
            num_outputs[penalised],
            *(params[:, which].copy() for which in columns),
        )
        history = state.history()[:, :most].index_select(0, index.index_select(0, sample_indices))
        apply_penalties(logits, history, lengths, frequency, presence, repetition, sample_indices)

    def _remember(
        self, token_ids: Tensor, rows: Int64Array, index: Tensor, positions: Int64Array
    ) -> None:
        state = self._rows
        valid = token_ids.clamp(min=0)
        state.last_token.index_copy_(0, index, valid)
        sample_indices = np.flatnonzero(state.has_penalties[rows])
        if len(sample_indices):
            output_positions = (positions - state.num_prompt[rows])[sample_indices]
            sample_index, position_index = to_device(state.device, sample_indices, output_positions)
            row_index = index.index_select(0, sample_index)
            state.history()[row_index, position_index] = valid.index_select(0, sample_index)
