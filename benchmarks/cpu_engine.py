"""Our engine (real processes, tokens streamed) beside `transformers` generate, in one run on a CPU.

    python -m benchmarks.cpu_engine [--shape small 0.5b] [--batch 1 8 32] [--json out.json]

Both sides get random weights of one shape, prompts of 128 random ids, greedy, end-of-sequence
ignored. Output tokens per second: all tokens of the batch over the time from the first token of the
last request to the end (decode), so prefill does not blur it; prefill is timed apart. A figure is
the best of `--repeat` runs, the sides taking turns, since neighbours on the machine only slow down.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from runtime.client.admission import EngineLimits
from runtime.client.client import EngineClient, GenerationInput
from runtime.client.host import EngineHost
from runtime.config import DetokenizerConfig, WorkerConfig
from runtime.sampling_params import SamplingParams
from runtime.transport import create_run_folder

SHAPES: dict[str, dict[str, Any]] = {
    "small": {
        "vocab_size": 8192,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    },
    "0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}
PROMPT_LEN = 128
PREFILL_LEN = 1024


def write_config(folder: Path, shape: str) -> None:
    """A Qwen2 `config.json` of the shape, with the demo model's tokenizer beside it."""
    from headrace.demo import MODEL_PATH

    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 0,
        "hidden_act": "silu",
        **SHAPES[shape],
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((MODEL_PATH / name).read_bytes())


class Ours:
    """The engine's own processes and client."""

    def __init__(self, folder: Path, vocab_size: int, threads: int) -> None:
        self.run_folder = create_run_folder()
        self.vocab_size = vocab_size
        worker = WorkerConfig(
            run_folder=str(self.run_folder),
            generation=0,
            model_folder=str(folder),
            load_format="dummy",
            dtype="bfloat16",
            device="cpu",
            context_len=2048,
            eos_token_ids=[0],
            random_seed=0,
            mem_fraction_static=None,
            max_total_tokens=64 * 1024,
            max_running_requests=64,
            max_queued_requests=None,
            chunked_prefill_size=1024,
            schedule_policy="fcfs",
            page_size=16,
            disable_radix_cache=True,
            overlap=False,
            attention_backend="auto",
            num_threads=threads,
            log_level="warning",
            decode_log_interval=40,
            stream_interval=1,
        )
        detokenizer = DetokenizerConfig(
            run_folder=str(self.run_folder),
            generation=0,
            scheduler_generation=0,
            tokenizer_folder=str(folder),
            log_level="warning",
        )
        self.client = EngineClient(EngineLimits(2048, 64 * 1024, vocab_size))
        self.host = EngineHost(worker, detokenizer, self.client, self.run_folder)

    async def start(self) -> float:
        started = time.perf_counter()
        await self.host.start()
        await self.host.wait_ready()
        return time.perf_counter() - started

    async def decode(self, batch: int, num_tokens: int) -> float:
        rng = np.random.default_rng(0)
        first: list[float] = []
        counts: list[tuple[float, int]] = []

        async def one(index: int) -> None:
            ids = rng.integers(1, self.vocab_size, PROMPT_LEN).tolist()
            stream = self.client.generate(
                GenerationInput(
                    rid=f"bench-{index}-{time.perf_counter_ns()}",
                    input_ids=ids,
                    sampling=SamplingParams(
                        max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True
                    ),
                    stream=True,
                )
            )
            seen = 0
            async for chunk in stream:
                if not seen:
                    first.append(time.perf_counter())
                seen += len(chunk.token_ids)
                counts.append((time.perf_counter(), len(chunk.token_ids)))

        await asyncio.gather(*(one(i) for i in range(batch)))
        start, end = max(first), max(when for when, _ in counts)
        return sum(count for when, count in counts if when > start) / (end - start)

    async def prefill(self, length: int) -> float:
        ids = np.random.default_rng(1).integers(1, self.vocab_size, length).tolist()
        started = time.perf_counter()
        stream = self.client.generate(
            GenerationInput(
                rid=f"prefill-{started}",
                input_ids=ids,
                sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
                stream=True,
            )
        )
        async for _ in stream:
            pass
        return length / (time.perf_counter() - started)

    def resident_gb(self) -> float:
        pid = self.host.pids()["scheduler"]
        text = Path(f"/proc/{pid}/status").read_text()
        return int(text.split("VmRSS:")[1].split()[0]) / 1e6


class Transformers:
    """`generate` of the same shape in this process."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.set_num_threads(threads)
        config = AutoConfig.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.torch = torch

    def decode(self, batch: int, num_tokens: int) -> float:
        torch = self.torch
        ids = torch.randint(1, self.model.config.vocab_size, (batch, PROMPT_LEN))
        times = []
        for length in (1, num_tokens):
            started = time.perf_counter()
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=length,
                min_new_tokens=length,
                do_sample=False,
                pad_token_id=0,
            )
            times.append(time.perf_counter() - started)
        return batch * (num_tokens - 1) / (times[1] - times[0])

    def prefill(self, length: int) -> float:
        torch = self.torch
        ids = torch.randint(1, self.model.config.vocab_size, (1, length))
        with torch.inference_mode():
            started = time.perf_counter()
            self.model(ids, logits_to_keep=1)
            return length / (time.perf_counter() - started)


async def measure(shape: str, options: argparse.Namespace) -> dict[str, Any]:
    """All figures of one shape, the sides taking turns."""
    folder = Path(tempfile.mkdtemp(prefix="bench-"))
    write_config(folder, shape)
    ours = Ours(folder, SHAPES[shape]["vocab_size"], options.threads)
    result: dict[str, Any] = {"shape": shape, "ready_s": round(await ours.start(), 2)}
    theirs = None if options.ours_only else Transformers(folder, options.threads)
    num_tokens = options.tokens
    try:
        for batch in options.batch:
            mine, other = [], []
            for _ in range(options.repeat):
                mine.append(await ours.decode(batch, num_tokens))
                if theirs is not None:
                    other.append(theirs.decode(batch, num_tokens))
            result[f"decode_b{batch}"] = _pair(mine, other)
        mine, other = [], []
        for _ in range(options.repeat + 1):
            mine.append(await ours.prefill(PREFILL_LEN))
            if theirs is not None:
                other.append(theirs.prefill(PREFILL_LEN))
        result["prefill_1024"] = _pair(mine, other)
        result["worker_rss_gb"] = round(ours.resident_gb(), 2)
    finally:
        await ours.host.stop()
    return result


def _pair(mine: list[float], other: list[float]) -> dict[str, float]:
    pair = {"headrace": round(max(mine), 1)}
    if other:
        pair["transformers"] = round(max(other), 1)
        pair["ratio"] = round(max(mine) / max(other), 2)
    return pair


def machine() -> dict[str, Any]:
    """What the figures belong to."""
    import torch
    import transformers

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = [asyncio.run(measure(shape, options)) for shape in options.shape]
    for result in results:
        print(f"\n{result['shape']}: ready in {result['ready_s']} s, {result['worker_rss_gb']} GB")
        for name, value in result.items():
            if isinstance(value, dict):
                print(f"  {name:14}" + "".join(f"  {k} {v:>9}" for k, v in value.items()))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
