"""First steps before the first request: kernels compile, caches fill, a broken model shows."""

from __future__ import annotations

import numpy as np

from runtime.errors import StartupError
from runtime.executor.model_runner import ModelRunner
from runtime.executor.out_of_memory import STEP_OUT_OF_MEMORY
from runtime.sampling_params import SamplingParams
from runtime.step import PageUpdate, RowJoin, StepPlan

_ZERO = np.zeros(1, dtype=np.int64)


def compute_prompt(
    runner: ModelRunner,
    length: int,
    vocab_size: int,
    num_pages: int = 0,
    *,
    cached: int = 0,
    count: int = 1,
) -> None:
    """Compute a made-up prompt of `length` tokens in row 0, or `count` of them in the first rows.

    Args:
        runner: an idle one.
        length: tokens.
        vocab_size: ids below it are used.
        num_pages: pages 1 to so many are written; 0 writes page 0, which belongs to nobody.
        cached: tokens ahead of these that count as computed.
        count: prompts.

    Raises:
        StartupError: the model cannot compute.
        MemoryError: there is too little memory for it.
    """
    joins = [
        RowJoin(
            row=row,
            sampling=SamplingParams(max_new_tokens=2, temperature=0.0),
            num_prompt=length,
            stop_ids=[],
            output_ids=np.empty(0, dtype=np.int32),
        )
        for row in range(count)
    ]
    pages = np.arange(1, num_pages + 1, dtype=np.int32)
    _launch(
        runner,
        StepPlan(
            rows=np.arange(count),
            num_decodes=0,
            start_lens=np.full(count, cached),
            query_lens=np.full(count, length),
            chunk_tokens=(np.arange(count * length) % vocab_size).astype(np.int32),
            samples=np.ones(count, dtype=bool),
            joins=joins,
            page_updates=[PageUpdate(0, 0, pages)] if num_pages else [],
        ),
    )


def warm_up(runner: ModelRunner, vocab_size: int, page_size: int, context_len: int) -> None:
    """Compute a short prompt and one token after it.

    Raises:
        StartupError: the model cannot compute.
        MemoryError: there is too little memory for it.
    """
    length = min(8, page_size - 1, context_len - 1) or 1
    compute_prompt(runner, length, vocab_size)
    _launch(
        runner,
        StepPlan(
            rows=_ZERO,
            num_decodes=1,
            start_lens=_ZERO + length,
            query_lens=_ZERO + 1,
            chunk_tokens=np.empty(0, dtype=np.int32),
            samples=np.ones(1, dtype=bool),
        ),
    )


def _launch(runner: ModelRunner, plan: StepPlan) -> None:
    result = runner.launch(plan).wait()
    if not result.failed:
        return
    if result.failed[0] == STEP_OUT_OF_MEMORY:
        raise MemoryError("a step at start-up")
    raise StartupError(f"The model cannot compute a step: {result.failed[0]}")
