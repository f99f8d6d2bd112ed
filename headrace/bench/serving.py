"""`headrace bench serving` sends requests to a running server and measures its latencies.

The server may be Headrace or another with the same APIs. Requests of a data set are sent at a given
rate, with a limit on the requests in flight. The arrival of every event of an answer is recorded.
`python -m headrace.bench.serving` runs the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headrace.bench.backends import BACKENDS, Wire, first_model
from headrace.bench.bench_options import check_at_least, check_writable
from headrace.bench.clients import ClientJob, make_target, send_all
from headrace.bench.datasets import (
    DEFAULT_VOCAB_SIZE,
    TokenSource,
    add_dataset_options,
    make_requests,
    random_requests,
)
from headrace.bench.driver import Benchmark, Run
from headrace.bench.load import arrival_offsets, drive
from headrace.bench.plot import check_plot_path, write_plot
from headrace.bench.progress import Progress
from headrace.bench.record import BenchRequest, RequestRecord, summarize
from headrace.bench.report import summary_lines
from runtime.checkpoint.hub import resolve_model_folder
from runtime.errors import HeadraceError, StartupError
from runtime.text.tokenizer import Tokenizer

_OBJECTIVES = ("ttft", "tpot", "e2e")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark to a parser."""
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="where the server is")
    parser.add_argument(
        "--backend", choices=list(BACKENDS), default="headrace", help="the API to use"
    )
    parser.add_argument("--model", help="name sent to OpenAI's routes; by default the first listed")
    parser.add_argument("--api-key", help="sent as a bearer token")
    add_dataset_options(parser)
    text = parser.add_argument_group("random tokens as text")
    text.add_argument("--random-text", action="store_true", help="send text, not token ids")
    text.add_argument("--tokenizer", help="folder or hub id; needed to make text of exact lengths")
    text.add_argument("--vocab-size", type=int, help="token ids below it are sent (default 4000)")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="R",
        help="requests per second, arriving as a Poisson process; inf (the default): all at once",
    )
    load.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight")
    load.add_argument("--num-client-processes", type=int, default=1, metavar="N")
    load.add_argument("--warmup-requests", type=int, default=1, metavar="N")
    load.add_argument("--flush-cache", action="store_true", help="drop the prefix cache first")
    load.add_argument("--timeout", type=float, default=1800.0, help="seconds for one request")
    load.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have every output reach its length (the default); --no-ignore-eos for services "
        "that refuse unknown keys",
    )
    load.add_argument("--temperature", type=float, default=0.0)
    load.add_argument("--extra-body", metavar="JSON", help="keys added to every request")
    out = parser.add_argument_group("results")
    out.add_argument(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="count requests within limits, such as ttft:500 tpot:50 e2e:10000",
    )
    out.add_argument(
        "--output-details", action="store_true", help="write every request to --output-file"
    )
    out.add_argument("--plot", type=Path, help="draw curves to FILE.svg, .html or .png")
    out.add_argument("--no-progress", action="store_true")


def measure(run: Run) -> int:
    """Send the requests, print the figures, and return the exit status.

    The status is 1 if a request failed, 130 if Ctrl-C stopped the run, and otherwise 0.

    Raises:
        HeadraceError: an option is wrong, or the server is unreachable or refuses a request.
    """
    options = run.options
    check(options)
    source = token_source(options)
    requests = make_requests(options, source)
    warm_up = warm_up_requests(options, requests, source)
    records: list[RequestRecord] = []
    stopped_early = False
    try:
        uvloop.run(send(options, requests, warm_up, source.rng, records))
    except (OSError, TimeoutError) as error:
        reason = error or "no answer in time"
        raise HeadraceError(f"{options.url} cannot be reached: {reason}.") from None
    except KeyboardInterrupt:
        if not records:
            raise
        stopped_early = True
        run.say(f"Stopped: {len(records)} of {len(requests)} requests had ended and are counted.")
    records.sort(key=lambda record: record.index)
    summary = summarize(records, objectives(options.goodput))
    run.say(*summary_lines(summary))
    details = {"requests": msgspec.to_builtins(records)} if options.output_details else {}
    run.write({**summary, "stopped_early": stopped_early}, **details)
    if options.plot is not None:
        rate = f"{summary['output_tok_per_s']:.0f} output tokens/s"
        write_plot(options.plot, f"{options.backend}: {len(records)} requests, {rate}", records)
    return 130 if stopped_early else 1 if summary["num_failed"] else 0


def check(options: argparse.Namespace) -> None:
    """Refuse contradictory options before anything is sent.

    Raises:
        StartupError: an option is invalid; the message names the first one.
    """
    if not options.request_rate > 0:
        raise StartupError("--request-rate must be above 0.")
    if not options.timeout > 0:
        raise StartupError("--timeout must be above 0.")
    check_at_least(1, options, "max_concurrency", "num_client_processes")
    check_at_least(0, options, "warmup_requests")
    # Token id 0 is never drawn, so the vocabulary needs at least two ids.
    check_at_least(2, options, "vocab_size")
    limit = options.max_concurrency
    if limit is not None and limit < options.num_client_processes:
        raise StartupError("--max-concurrency must be at least --num-client-processes.")
    objectives(options.goodput)
    extra_body(options.extra_body)
    if options.output_details and options.output_file is None:
        raise StartupError("--output-details needs --output-file.")
    check_writable("--plot", options.plot)
    if options.plot is not None:
        check_plot_path(options.plot)


def objectives(given: Sequence[str] | None) -> dict[str, float] | None:
    """Parse `--goodput` values such as `ttft:500` into milliseconds by name; None without any.

    Raises:
        StartupError: a value does not have the form `name:milliseconds`.
    """
    if not given:
        return None
    limits = {}
    for item in given:
        name, _, text = item.partition(":")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if name not in _OBJECTIVES or not limits[name] > 0:
            names = ", ".join(_OBJECTIVES)
            raise StartupError(f"--goodput {item}: must be NAME:MS with NAME one of {names}.")
    return limits


def extra_body(text: str | None) -> dict[str, Any]:
    """Parse the JSON object of `--extra-body`.

    Raises:
        StartupError: the option is not a JSON object.
    """
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise StartupError(f"--extra-body: {error}.") from None
    if not isinstance(value, dict):
        raise StartupError("--extra-body must be a JSON object.")
    return value


def token_source(options: argparse.Namespace) -> TokenSource:
    """Return the source of random prompts: token ids, or texts with `--random-text`.

    Raises:
        StartupError: texts are requested, but no tokenizer is given or it does not exist.
    """
    wants_text = options.random_text or options.backend == "openai-chat"
    rng = random.Random(options.seed)
    if options.dataset_name == "jsonl":
        return TokenSource(rng, DEFAULT_VOCAB_SIZE)
    if wants_text and options.tokenizer is None:
        raise StartupError("Random text of exact lengths needs --tokenizer, a folder or hub id.")
    if options.tokenizer is None:
        return TokenSource(rng, options.vocab_size or DEFAULT_VOCAB_SIZE)
    tokenizer = Tokenizer.from_folder(resolve_model_folder(options.tokenizer, None))
    size = options.vocab_size or tokenizer.vocab_size
    return TokenSource(rng, size, tokenizer if wants_text else None)


def make_job(options: argparse.Namespace, model: str) -> ClientJob:
    """Make a job for the client processes; its requests are added later."""
    extra = extra_body(options.extra_body)
    return ClientJob(
        url=options.url,
        backend=options.backend,
        headers={"Authorization": f"Bearer {options.api_key}"} if options.api_key else {},
        wire=Wire(model, options.ignore_eos, options.temperature, extra),
        timeout_s=options.timeout,
        max_concurrency=options.max_concurrency,
    )


def warm_up_requests(
    options: argparse.Namespace, requests: Sequence[BenchRequest], source: TokenSource
) -> list[BenchRequest]:
    """Make the requests of the warm-up, which are not counted.

    Random prompts of the warm-up share no prefix with the prompts of `requests`.
    """
    count = options.warmup_requests
    if options.dataset_name == "jsonl":
        return [requests[index % len(requests)] for index in range(count)]
    return random_requests(source, count, options.random_input_len, options.random_output_len)


def _hinted(options: argparse.Namespace, error: str) -> str:
    made_up = options.dataset_name != "jsonl" and not options.tokenizer and not options.vocab_size
    if not made_up or "HTTP 400" not in error:
        return error
    hint = f"Token ids below {DEFAULT_VOCAB_SIZE} were sent; --vocab-size sets another limit."
    return f"{error} ({hint})"


async def send(
    options: argparse.Namespace,
    requests: Sequence[BenchRequest],
    warm_up: Sequence[BenchRequest],
    rng: random.Random,
    records: list[RequestRecord],
) -> None:
    """Send the warm-up, then all requests; append a record to `records` when a request ends.

    Raises:
        HeadraceError: a request of the warm-up failed, so the other requests would fail too.
        OSError: the server cannot be reached.
    """
    job = make_job(options, options.model or "")
    target = make_target(job)
    for request in requests:
        # Make each body once now: a request that this API cannot express must fail before the run.
        target.backend.body(request, target.wire)
    await target.client.connect()
    if options.backend.startswith("openai") and not options.model:
        job = make_job(options, await first_model(target.client))
        target.client.close()
        target = make_target(job)
    numbered = [(index, 0.0, request) for index, request in enumerate(warm_up)]
    failed = [record for record in await drive(numbered, target) if record.error]
    if failed:
        raise HeadraceError(f"The first request failed: {_hinted(options, failed[0].error)}")
    if options.flush_cache:
        await target.flush_cache()
    target.client.close()
    offsets = arrival_offsets(len(requests), options.request_rate, rng)
    timed = [
        (index, offset, request)
        for index, (offset, request) in enumerate(zip(offsets, requests, strict=True))
    ]
    job = msgspec.structs.replace(job, requests=timed)
    with closing(Progress(len(requests), enabled=not options.no_progress)) as progress:

        def on_done(record: RequestRecord) -> None:
            records.append(record)
            progress.add()

        await send_all(job, options.num_client_processes, on_done)


SERVING = Benchmark(
    "serving",
    "Send requests to a running server and measure its answers.",
    add_options,
    measure,
    starts_engine=False,
)
main = SERVING.main

if __name__ == "__main__":
    sys.exit(main())
