"""`headrace bench one-batch` measures the step times of one batch in the worker.

Only scheduler, model and device are timed, without the front process, the detokenizer and the
messages between processes. The worker runs in a separate process, so that this module does not
import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import subprocess
import sys
from typing import Any

import msgspec

from headrace.bench.bench_options import add_batch_options, check_batch_options
from headrace.bench.driver import Benchmark, Run
from headrace.bench.engine_target import engine_config
from headrace.bench.one_batch_job import BatchJob, BatchResult
from headrace.bench.record import distribution
from runtime.config.options import ServerConfig
from runtime.errors import HeadraceError, StartupError
from runtime.ipc.process import compute_environment, send_config
from runtime.ipc.spawn import child_environment
from runtime.ipc.transport import remove_run_folder
from runtime.launch.prepare import prepare_engine


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to a parser."""
    parser.add_argument(
        "--batch-size",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="one batch size or several",
    )
    add_batch_options(parser, output_len=32, num_iters=3, num_warmup=1)


def measure(run: Run) -> int:
    """Time each batch size in a new process, print its figures, and return the exit status 0.

    Raises:
        HeadraceError: the worker cannot start, or a request failed.
    """
    options = run.options
    check_batch_options(options)
    results = []
    with engine_config(options.shape, run.server_options) as config:
        for batch_size in options.batch_size:
            result = _time(config, batch_size, options)
            results.append(figures(result, batch_size, options.input_len))
            run.say(_line(results[-1]))
    run.write({"batches": results})
    return 0


def _time(config: ServerConfig, batch_size: int, options: argparse.Namespace) -> BatchResult:
    prepared = prepare_engine(config)
    worker = prepared.resolved.worker
    try:
        if batch_size > worker.max_running_requests:
            raise StartupError(
                f"--batch-size {batch_size} is more than --max-running-requests "
                f"({worker.max_running_requests})."
            )
        if options.input_len + options.output_len > worker.context_len:
            raise StartupError(
                f"{options.input_len} tokens in and {options.output_len} out do not fit the "
                f"context of {worker.context_len}."
            )
        job = BatchJob(
            worker=dataclasses.replace(worker, grammar_backend="none"),
            batch_size=batch_size,
            input_len=options.input_len,
            output_len=options.output_len,
            num_iters=options.num_iters,
            num_warmup=options.num_iters_warmup,
            seed=options.seed,
        )
        return _in_a_process(job)
    finally:
        remove_run_folder(prepared.folders.run)


def _in_a_process(job: BatchJob) -> BatchResult:
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "headrace.bench.one_batch_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment(compute_environment(job.worker.num_threads)),
        # The worker must not get a terminal's Ctrl-C. It ends when this process ends.
        start_new_session=True,
    ) as worker:
        send_config(worker, job)
        assert worker.stdout is not None
        output = worker.stdout.read()
    result = BatchResult(error=f"The worker ended with exit code {worker.returncode}.")
    with contextlib.suppress(msgspec.DecodeError):
        result = msgspec.json.decode(output, type=BatchResult)
    if result.error:
        raise HeadraceError(result.error)
    return result


def figures(result: BatchResult, batch_size: int, input_len: int) -> dict[str, Any]:
    """Return milliseconds and rates for one batch size, from the steps of all counted batches."""
    prefill = distribution([batch.prefill_s * 1e3 for batch in result.batches])
    steps = distribution([step * 1e3 for batch in result.batches for step in batch.steps_s])
    return {
        "batch_size": batch_size,
        "load_s": result.load_s,
        "attention_backend": result.attention_backend,
        "max_total_num_tokens": result.max_total_num_tokens,
        "prefill_ms": prefill,
        "prefill_tok_per_s": batch_size * input_len / prefill["p50"] * 1e3,
        "step_ms": steps,
        "decode_tok_per_s": batch_size / steps["p50"] * 1e3 if steps else 0.0,
    }


def _line(result: dict[str, Any]) -> str:
    text = (
        f"batch {result['batch_size']:>4}: prefill {result['prefill_ms']['p50']:.2f} ms "
        f"({result['prefill_tok_per_s']:.0f} tok/s)"
    )
    steps = result["step_ms"]
    if steps:
        text += (
            f", step {steps['p50']:.3f} ms (p99 {steps['p99']:.3f}), "
            f"{result['decode_tok_per_s']:.0f} tok/s"
        )
    return text


ONE_BATCH = Benchmark(
    "one-batch", "Times of prefill and decode steps at the worker itself.", add_options, measure
)
main = ONE_BATCH.main

if __name__ == "__main__":
    sys.exit(main())
