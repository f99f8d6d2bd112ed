"""The messages between `headrace bench one-batch` and its worker process; imports no torch."""

from __future__ import annotations

import msgspec

from runtime.config.options import WorkerConfig


class BatchJob(msgspec.Struct, kw_only=True):
    """A job for the worker: time `num_iters` batches after `num_warmup` batches of warm-up."""

    worker: WorkerConfig
    batch_size: int
    input_len: int
    output_len: int
    num_iters: int
    num_warmup: int
    seed: int


class BatchTimes(msgspec.Struct, kw_only=True):
    """Times of one batch.

    Attributes:
        prefill_s: seconds from the requests' arrival until every request has its first token.
        steps_s: seconds of each decode step of the full batch after that.
    """

    prefill_s: float
    steps_s: list[float]


class BatchResult(msgspec.Struct, kw_only=True):
    """The worker's answer to a `BatchJob`; `error` is one line, and empty on success."""

    load_s: float = 0.0
    max_total_num_tokens: int = 0
    attention_backend: str = ""
    batches: list[BatchTimes] = []
    error: str = ""
