"""Compares tensor parallelism with one GPU: greedy tokens, and the time of a decode step.

    python -m benchmarks.h200.tensor_parallel [--shape 0.5b 8b] [--tp 1 2] [--json FILE]

Dummy weights are the same on any number of ranks. Tokens are compared in float32, where the order
of a sum rarely decides which token is chosen. Some prompts are all different, and others have a
long common beginning. If two runs choose different tokens, the printed lead of the most probable
token over the second shows whether rounding decided. Times are measured in bfloat16. Results are
added to the file of `--json`; a later run with `--tp 4` compares its tokens with those in the file.
Each case runs in a separate process. `--device cpu --shape tiny` runs on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench.environment import describe_environment
from headrace.bench.shapes import SHAPES, write_shape
from runtime.extras.logprobs.positions import LogprobSpec, PositionLogprobs

NUM_PROMPTS, NUM_NEW = 8, 48
# With so many requests, decode steps read the common beginning once for all, even if a rank has
# only one key head.
NUM_SHARING, SHARED_LEN = 120, 1500
BATCHES = (1, 64)
PROMPT_LEN, STEPS = 256, 100


def case(shape: str, tp_size: int, device: str, dtype: str) -> dict[str, Any]:
    """Run one case in this process, and return its results."""
    from tests.support.engine import InProcessEngine

    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        engine = InProcessEngine(
            write_shape(shape, Path(folder) / "model"),
            device=device,
            dtype=dtype,
            load_format="dummy",
            context_len=2048,
            max_total_tokens=64_000,
            max_running_requests=128,
            chunked_prefill_size=2048,
            overlap=device == "cuda",
            tp_size=tp_size,
        )
        result: dict[str, Any] = {"ready_s": time.perf_counter() - started}
        rng = np.random.default_rng(0)
        vocab_size = SHAPES[shape]["vocab_size"]
        if dtype == "float32":
            lengths = [35 + 30 * i for i in range(NUM_PROMPTS)]
            prompts = [rng.integers(1, vocab_size, length).tolist() for length in lengths]
            shared = rng.integers(1, vocab_size, SHARED_LEN).tolist()
            prompts += [
                shared + rng.integers(1, vocab_size, 5 + i).tolist() for i in range(NUM_SHARING)
            ]
            for i, prompt in enumerate(prompts):
                engine.add(i, prompt, NUM_NEW, LogprobSpec(top_num=2), ignore_eos=True)
            engine.run()
            numbers = range(len(prompts))
            result["tokens"] = [engine.tokens[i] for i in numbers]
            result["leads"] = [[lead(each) for each in engine.outputs[i]] for i in numbers]
            return result
        next_id = 1
        for batch in BATCHES:
            for _ in range(2):
                for _ in range(batch):
                    prompt = rng.integers(1, vocab_size, PROMPT_LEN).tolist()
                    engine.add(next_id, prompt, STEPS + 40, ignore_eos=True)
                    next_id += 1
                ids = range(next_id - batch, next_id)
                while not all(len(engine.tokens.get(i, ())) >= 20 for i in ids):
                    engine.scheduler.step()
                # With overlap, a step waits for the previous step, so the clock covers whole steps.
                began = time.perf_counter()
                for _ in range(STEPS):
                    engine.scheduler.step()
                result[f"step_ms_batch_{batch}"] = (time.perf_counter() - began) / STEPS * 1e3
                engine.run()
        return result


def lead(position: PositionLogprobs) -> float:
    """Return how far the most probable token leads the second, in log-probability."""
    (first, _), (second, _) = position.top
    return first - second


def start(shape: str, tp_size: int, device: str, dtype: str, gpu: int) -> subprocess.Popen[bytes]:
    environment = dict(os.environ)
    if tp_size == 1:
        environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
    command = [sys.executable, "-m", "benchmarks.h200.tensor_parallel"]
    command += ["--case", shape, str(tp_size), device, dtype]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)


def finish(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    output, _ = process.communicate()
    lines = output.decode().splitlines()
    return json.loads(lines[-1]) if lines and process.returncode == 0 else {"failed": True}


def partings(one: list[list[int]], other: list[list[int]], leads: list[list[float]]) -> list[float]:
    """Return the lead of the token in `other` at the first position where a request differs.

    One lead per request whose tokens in `one` and `other` differ.
    """
    return [
        lead
        for mine, theirs, each in zip(one, other, leads, strict=True)
        for lead in [lead for a, b, lead in zip(mine, theirs, each, strict=True) if a != b][:1]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="*", default=["0.5b", "8b"])
    parser.add_argument("--tp", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        shape, tp_size, device, dtype = options.case
        print(json.dumps(case(shape, int(tp_size), device, dtype)), flush=True)
        # The process ends without leaving the group; the other ranks end when this process does.
        os._exit(0)
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())
    results["environment"] = describe_environment()
    for shape in options.shape:
        for tp_size in options.tp:
            key = f"{shape} tp{tp_size}"
            # With one GPU per case, both dtypes run at the same time; cases with several ranks run
            # alone.
            if tp_size == 1:
                running = [
                    start(shape, 1, options.device, dtype, gpu)
                    for gpu, dtype in enumerate(("float32", "bfloat16"))
                ]
                exact, fast = (finish(process) for process in running)
            else:
                exact = finish(start(shape, tp_size, options.device, "float32", 0))
                fast = finish(start(shape, tp_size, options.device, "bfloat16", 0))
            tokens = exact.get("tokens")
            results[key] = fast | {"tokens": tokens}
            shown = {k: v if isinstance(v, bool) else round(v, 3) for k, v in fast.items()}
            print(f"{key}: {json.dumps(shown)}", end="; ")
            first = results.get(f"{shape} tp1", results[key])["tokens"]
            if first and tokens:
                parted = results[key]["parted_by"] = partings(first, tokens, exact["leads"])
                print(f"{len(tokens) - len(parted)} of {len(tokens)} requests give", end=" ")
                print(f"the same {NUM_NEW} tokens as one GPU, others part by {parted}", flush=True)
            else:
                print("no tokens", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
