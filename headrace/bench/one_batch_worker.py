"""A process that times the steps of one batch with the worker's scheduler and model.

`python -m headrace.bench.one_batch_worker` reads a `BatchJob` from standard input (msgpack) and
writes a `BatchResult` to standard output (JSON). `headrace bench one-batch` starts it.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import zmq

from headrace.bench.one_batch_job import BatchJob, BatchResult, BatchTimes
from runtime.errors import HeadraceError
from runtime.ipc.logging import configure_logging
from runtime.ipc.messages import GenerateRequest, TokenDeltas
from runtime.ipc.process import run_child
from runtime.ipc.shared_state import SharedState
from runtime.models.registry import read_model_spec
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from runtime.scheduler.scheduler import Scheduler
from runtime.step.step_plan import Int32Array
from runtime.worker.build_worker import build_worker
from runtime.worker.ranks import Ranks

logger = logging.getLogger(__name__)


class _Batch:
    """Records the times at which the tokens of one batch leave the scheduler."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begin = time.perf_counter()
        self.failure = ""
        self._started: set[int] = set()
        self._prefilled_at: float | None = None
        self._last = 0.0
        self._steps_s: list[float] = []

    def take(self, message: TokenDeltas) -> None:
        now = time.perf_counter()
        if self._prefilled_at is not None and sum(message.token_counts) == self.size:
            self._steps_s.append(now - self._last)
        for request_id, count in zip(message.request_ids, message.token_counts, strict=True):
            if count:
                self._started.add(request_id)
        if self._prefilled_at is None and len(self._started) == self.size:
            self._prefilled_at = now
        self._last = now
        for end in message.ends:
            if end.reason.status_code is not None:
                self.failure = end.reason.message or "A request was refused."

    def times(self) -> BatchTimes:
        if self.failure or self._prefilled_at is None:
            raise HeadraceError(self.failure or "A request ended without a token.")
        return BatchTimes(prefill_s=self._prefilled_at - self.begin, steps_s=self._steps_s)


def run_job(job: BatchJob) -> BatchResult:
    """Build the worker and time the batches.

    Raises:
        HeadraceError: the model does not load, or a request fails.
    """
    started = time.perf_counter()
    batch = _Batch(job.batch_size)

    def take(message: TokenDeltas) -> None:
        batch.take(message)

    shared = SharedState(Path(job.worker.run_folder) / "state", create=True)
    ranks: Ranks | None = None
    if job.worker.num_ranks > 1:
        ranks = Ranks(zmq.Context(), job.worker, logger.error)
    scheduler, ready = build_worker(
        job.worker, shared, take, lambda _: None, lambda *_: None, ranks
    )
    load_s = time.perf_counter() - started
    vocab_size = read_model_spec(
        Path(job.worker.model_folder), job.worker.model_overrides
    ).vocab_size
    rng = np.random.default_rng(job.seed)
    batches: list[BatchTimes] = []
    for iteration in range(job.num_warmup + job.num_iters):
        shape = (job.batch_size, job.input_len)
        prompts: Int32Array = rng.integers(1, vocab_size, shape, dtype=np.int32)
        batch = _Batch(job.batch_size)
        _run(scheduler, prompts, 1 + iteration * job.batch_size, job.output_len)
        times = batch.times()
        if iteration >= job.num_warmup:
            batches.append(times)
    return BatchResult(
        load_s=load_s,
        max_total_num_tokens=ready.max_total_num_tokens,
        attention_backend=ready.attention_backend,
        batches=batches,
    )


def _run(scheduler: Scheduler, prompts: Int32Array, first_id: int, output_len: int) -> None:
    sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True, seed=1)
    scheduler.receive(
        [
            GenerateRequest(
                request_id=first_id + index,
                input_ids=prompt.tobytes(),
                spec=RequestSpec(row=RowSpec(sampling=sampling), stream=True),
                arrival=time.monotonic(),
            )
            for index, prompt in enumerate(prompts)
        ]
    )
    while scheduler.has_work:
        scheduler.step()
    scheduler.rest()


def main(payload: bytes) -> None:
    """Run the `BatchJob` given as msgpack and write its result to standard output."""
    job = msgspec.msgpack.decode(payload, type=BatchJob)
    # Standard output is kept for the result; anything that libraries print goes to standard error.
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    configure_logging(job.worker.log_level, "worker")
    try:
        result = run_job(job)
    except HeadraceError as error:
        result = BatchResult(error=error.message)
    with output:
        output.write(msgspec.json.encode(result))


if __name__ == "__main__":
    run_child(main)
