"""Device-resident state of the running batch: one row per request, written when something changes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from runtime.step import Int64Array, PageUpdate, RowJoin
from runtime.sampling_params import SamplingParams


class BatchRows:
    """Rows of the running batch.

    Attributes:
        page_table: `[max_rows, max_pages]` int32.
        last_token: `[max_rows]` int64, the newest sampled token: the next decode step's input.
        params: `[max_rows, 6]` float32: temperature, top_p, min_p, frequency, presence, repetition.
        seeds: `[max_rows]` int64.
        top_k: `[max_rows]` int32, the vocabulary's size when off.
        num_prompt: `[max_rows]` int64 on the host.
    """

    TEMPERATURE, TOP_P, MIN_P, FREQUENCY, PRESENCE, REPETITION = range(6)

    def __init__(self, max_rows: int, max_pages: int, max_len: int, vocab_size: int) -> None:
        """Allocate for `max_rows` requests of up to `max_len` tokens."""
        self.vocab_size = vocab_size
        self._max_len = max_len
        # The host's view of the same memory, so that vectorised writes cost no tensor calls.
        self.page_table_host: NDArray[np.int32] = np.zeros((max_rows, max_pages), dtype=np.int32)
        self.last_token = torch.zeros(max_rows, dtype=torch.int64)
        self.params = torch.zeros(max_rows, 6, dtype=torch.float32)
        self.seeds = torch.zeros(max_rows, dtype=torch.int64)
        self.top_k = torch.zeros(max_rows, dtype=torch.int32)
        self.num_prompt: Int64Array = np.zeros(max_rows, dtype=np.int64)
        self.sampling: list[SamplingParams | None] = [None] * max_rows
        self.stop_ids: list[list[int]] = [[] for _ in range(max_rows)]
        self.is_greedy = np.ones(max_rows, dtype=bool)
        # Anything that changes logits before sampling: such rows leave the fast path.
        self.is_special = np.zeros(max_rows, dtype=bool)
        self.has_penalties = np.zeros(max_rows, dtype=bool)
        self._history: torch.Tensor | None = None

    def join(self, join: RowJoin) -> None:
        """Reset a row for its new request."""
        row, sampling = join.row, join.sampling
        greedy = sampling.is_greedy
        self.sampling[row] = sampling
        self.stop_ids[row] = join.stop_ids
        self.num_prompt[row] = join.num_prompt
        self.is_greedy[row] = greedy
        self.has_penalties[row] = sampling.has_penalties
        self.is_special[row] = (
            sampling.has_penalties or bool(sampling.logit_bias) or sampling.min_new_tokens > 0
        )
        self.params[row] = torch.tensor(
            (
                0.0 if greedy else sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.frequency_penalty,
                sampling.presence_penalty,
                sampling.repetition_penalty,
            )
        )
        self.seeds[row] = sampling.seed or 0
        self.top_k[row] = sampling.top_k if sampling.top_k > 0 else self.vocab_size
        self.page_table_host[row] = 0
        if sampling.has_penalties:
            output_ids = torch.from_numpy(join.output_ids.astype(np.int64))
            self.history()[row, : len(output_ids)] = output_ids

    def update_pages(self, update: PageUpdate) -> None:
        """Write part of a row's page table."""
        end = update.start + len(update.pages)
        self.page_table_host[update.row, update.start : end] = update.pages

    def history(self) -> torch.Tensor:
        """`[max_rows, max_len]` int64, generated tokens; made when the first penalty is asked for."""
        if self._history is None:
            self._history = torch.zeros(len(self.sampling), self._max_len, dtype=torch.int64)
        return self._history
