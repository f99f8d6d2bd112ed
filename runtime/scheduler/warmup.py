"""First steps before the first request: kernels compile, caches fill, a broken model shows."""

from __future__ import annotations

import numpy as np

from runtime.config import WorkerConfig
from runtime.errors import StartupError
from runtime.executor.model_runner import ModelRunner
from runtime.step import PageUpdate, RowJoin, StepPlan
from runtime.sampling_params import SamplingParams


def warm_up(runner: ModelRunner, vocab_size: int, config: WorkerConfig) -> None:
    """Compute a short prompt and one token after it, in page 0, which belongs to nobody.

    Raises:
        StartupError: the model cannot compute.
    """
    length = min(8, config.page_size - 1, config.context_len - 1) or 1
    join = RowJoin(
        row=0,
        sampling=SamplingParams(max_new_tokens=2, temperature=0.0),
        num_prompt=length,
        stop_ids=[],
        output_ids=np.empty(0, dtype=np.int32),
    )
    one = np.zeros(1, dtype=np.int64)
    prompt = StepPlan(
        rows=one,
        num_decodes=0,
        start_lens=one,
        query_lens=one + length,
        chunk_tokens=(np.arange(length) % vocab_size).astype(np.int32),
        samples=np.ones(1, dtype=bool),
        joins=[join],
        page_updates=[PageUpdate(0, 0, np.zeros(1, dtype=np.int32))],
    )
    decode = StepPlan(
        rows=one,
        num_decodes=1,
        start_lens=one + length,
        query_lens=one + 1,
        chunk_tokens=np.empty(0, dtype=np.int32),
        samples=np.ones(1, dtype=bool),
    )
    for plan in (prompt, decode):
        result = runner.launch(plan).wait()
        if result.failed:
            raise StartupError(f"The model cannot compute a step: {result.failed[0]}")
