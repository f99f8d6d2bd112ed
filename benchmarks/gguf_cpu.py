"""Compares our engine with llama.cpp and `transformers` on GGUF files, in one run on a CPU.

    python -m benchmarks.gguf_cpu FILE.gguf... --llama-python VENV/bin/python [--json out.json]

`--llama-python` is the interpreter of an environment whose `llama-cpp-python` was built on this
machine (`pip install --no-binary llama-cpp-python llama-cpp-python`). Without this option llama.cpp
is not measured. All sides get the same file, prompts and threads, and take turns. Other load on the
machine only makes a turn slower, so a figure is the best of `--repeat` turns.

Output tokens per second are measured at each batch size with prompts of 128 random ids. Decoding is
greedy and ignores the end-of-sequence token; time counts from the first token of the last prompt.
Our tokens are streamed by the engine's own processes. Of llama.cpp only `llama_decode` counts, with
its defaults (`benchmarks.gguf_peer`). Input tokens per second are those of one prompt of 1024
tokens. `read` is the speed of reading memory with the same threads, from an array of the file's
size. `of_read` is the share of this speed that batch 1 uses: bytes of the file per token, over
`read`. `transformers` runs the same weights, converted to `--transformers-dtype`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu_engine import PREFILL_LEN, PROMPT_LEN, Transformers
from headrace.bench.engine_target import EngineTarget, engine_config, running_engine
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.load import run_at_once
from headrace.bench.record import BenchRequest
from kernels.quantized_linear.cpu import dots_name
from runtime.checkpoint.gguf.config import gguf_configs
from runtime.processes.resident import resident_bytes

SERVER_OPTIONS = (
    *("--device", "cpu", "--context-length", "2048"),
    *("--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--chunked-prefill-size", "1024", "--disable-radix-cache", "--random-seed", "0"),
)
# Tokens per sequence in llama.cpp's context, which divides `n_ctx` evenly.
CONTEXT = 1056


class LlamaCpp:
    """`benchmarks.gguf_peer` in an interpreter of its own, which need not have our packages."""

    def __init__(self, python: Path, path: Path, threads: int, batch: int, length: int) -> None:
        script = Path(__file__).with_name("gguf_peer.py")
        numbers = (str(threads), str(batch), str(length))
        self.process = subprocess.Popen(
            [str(python), str(script), str(path), *numbers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Send one question and return its answer.

        Raises:
            RuntimeError: the process ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"llama.cpp ended with status {self.process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextmanager
def llama_cpp(
    python: Path, path: Path, threads: int, batch: int, length: int = CONTEXT
) -> Iterator[LlamaCpp]:
    """Run a `LlamaCpp` that is ready for questions."""
    peer = LlamaCpp(python, path, threads, batch, length)
    try:
        yield peer
    finally:
        peer.close()


class Widened(Transformers):
    """`generate` of `transformers` on the shape of a GGUF file, with floats."""

    def __init__(self, path: Path, threads: int, dtype: str) -> None:
        config, _ = gguf_configs(path)
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            # The weights are random, because times do not depend on them.
            (Path(name) / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
            super().__init__(Path(name), threads, dtype)


async def generate(engine: EngineTarget, prompts: list[list[int]], num_tokens: int) -> float:
    """Return our output tokens per second after the last prompt's first token."""
    requests = [
        BenchRequest(prompt_len=len(ids), output_len=num_tokens, input_ids=ids) for ids in prompts
    ]
    records = await run_at_once(requests, engine)
    start = max(record.event_times[0] for record in records)
    end = max(record.event_times[-1] for record in records)
    later = sum(
        count
        for record in records
        for when, count in zip(record.event_times, record.event_tokens, strict=True)
        if when > start
    )
    return later / (end - start)


async def prompt(engine: EngineTarget, ids: list[int]) -> float:
    """Return our input tokens per second for one prompt."""
    request = BenchRequest(prompt_len=len(ids), output_len=1, input_ids=ids)
    (record,) = await run_at_once([request], engine)
    return len(ids) / record.e2e_s


def read_speed(num_bytes: int) -> float:
    """Return how many bytes per second a sum over an array reads, the best of 5 runs."""
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - started)
    return num_bytes / best


class Sides:
    """The sides that take turns on one file."""

    def __init__(self, engine: EngineTarget, path: Path, options: argparse.Namespace) -> None:
        self.engine = engine
        self.repeat: int = options.repeat
        self.llama = self.transformers = None
        if options.llama_python is not None:
            most = max(options.batch)
            self.llama = LlamaCpp(options.llama_python, path, options.threads, most, CONTEXT)
        if options.transformers_dtype != "none":
            self.transformers = Widened(path, options.threads, options.transformers_dtype)

    async def output(self, prompts: list[list[int]], num_tokens: int) -> dict[str, float]:
        """Return output tokens per second of each side."""
        times: dict[str, list[float]] = {"headrace": [], "llama.cpp": [], "transformers": []}
        for _ in range(self.repeat):
            times["headrace"].append(await generate(self.engine, prompts, num_tokens))
            if self.llama is not None:
                found = self.llama.ask("generate", prompts=prompts, num_tokens=num_tokens)
                times["llama.cpp"].append(found["tokens_per_s"])
            if self.transformers is not None:
                speed = self.transformers.decode(len(prompts), min(num_tokens, 16))
                times["transformers"].append(speed)
        return best(times)

    async def input(self, ids: list[int]) -> dict[str, float]:
        """Return input tokens per second of each side."""
        times: dict[str, list[float]] = {"headrace": [], "llama.cpp": [], "transformers": []}
        for _ in range(self.repeat + 1):
            times["headrace"].append(await prompt(self.engine, ids))
            if self.llama is not None:
                times["llama.cpp"].append(self.llama.ask("prompt", ids=ids)["tokens_per_s"])
            if self.transformers is not None:
                times["transformers"].append(self.transformers.prefill(len(ids)))
        return best(times)


async def compare(path: Path, num_bytes: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all figures of one file."""
    config, _ = gguf_configs(path)
    rng, vocab_size = random.Random(0), int(config["vocab_size"])

    def ids(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    result: dict[str, Any] = {"file": path.name, "bytes": num_bytes}
    threads = ["--num-threads", str(options.threads)]
    with engine_config(None, ["--model-path", str(path), *SERVER_OPTIONS, *threads]) as server:
        async with running_engine(server) as engine:
            result["ready_s"] = {"headrace": round(engine.start_s, 2)}
            sides = Sides(engine, path, options)
            if sides.llama is not None:
                found = sides.llama.ask("ready")
                result["ready_s"]["llama.cpp"] = round(found["ready_s"], 2)
                result["llama.cpp"] = found["instructions"]
            for batch in options.batch:
                prompts = [ids(PROMPT_LEN) for _ in range(batch)]
                result[f"output_b{batch}"] = await sides.output(prompts, options.tokens)
            result[f"input_{PREFILL_LEN}"] = await sides.input(ids(PREFILL_LEN))
            result["resident_mb"] = {"headrace": round(sum(engine.memory_mb().values()))}
            if sides.llama is not None:
                used = resident_bytes([sides.llama.process.pid])
                result["resident_mb"]["llama.cpp"] = round(used / 2**20)
                sides.llama.close()
    torch.set_num_threads(options.threads)
    speed = read_speed(num_bytes)
    result["read_gb_s"] = round(speed / 1e9, 1)
    if "output_b1" in result:
        result["of_read"] = round(result["output_b1"]["headrace"] * num_bytes / speed, 2)
    return result


def best(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the best figure of each side, and ours as a multiple of the others."""
    found = {side: round(max(speeds), 1) for side, speeds in times.items() if speeds}
    for side in ("llama.cpp", "transformers"):
        if side in found:
            found[f"of {side}"] = round(max(times["headrace"]) / max(times[side]), 2)
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--llama-python", type=Path)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--transformers-dtype", default="float32", choices=("float32", "bfloat16", "none")
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for path in options.files:
        result = asyncio.run(compare(path, path.stat().st_size, options))
        results.append(result)
        print(f"\n{result['file']}, {dots_name()}: {result['read_gb_s']} GB/s")
        for name, value in result.items():
            if name not in ("file", "read_gb_s"):
                print(f"  {name:14}", value)
    if options.json:
        machine = {**describe_environment(), "products": dots_name(), "threads": options.threads}
        write_json(options.json, {"machine": machine, "results": results})


if __name__ == "__main__":
    main()
