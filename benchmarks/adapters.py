"""Times decode steps with LoRA adapters and with the base model, in the same worker.

    python -m benchmarks.adapters --shape 0.5b --device cpu --batch 8 --adapters 1 8
    python -m benchmarks.adapters --shape 8b --device cuda --batch 1 64 --adapters 1 8 64

The worker's parts run in this process, with random weights and without HTTP. The rows of a batch
use the adapters in turn; each adapter changes every linear layer. Base and adapters alternate
`--repeat` times, and the best median of each counts. Each line has the milliseconds of a step, the
tokens per second, and these as a share of the base model's tokens per second.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES, write_shape
from runtime.checkpoint.peft_adapter import (
    CONFIG_FILE,
    TENSORS_FILE,
    adaptable_weights,
    target_modules,
)
from runtime.config.lora_options import LoraLimits
from runtime.ipc.weight_messages import LoadAdapter
from runtime.models.registry import read_model_spec
from tests.support.engine import InProcessEngine


def write_adapter(folder: Path, model_folder: Path, rank: int) -> Path:
    """Write a random adapter of all linear layers, in bfloat16, and return its folder."""
    folder.mkdir()
    tensors = {}
    for name, weight in adaptable_weights(read_model_spec(model_folder)).items():
        rows, columns = weight.shape
        full = f"base_model.model.{name}"
        tensors[f"{full}.lora_A.weight"] = torch.randn(rank, columns).mul_(0.01).bfloat16()
        tensors[f"{full}.lora_B.weight"] = torch.randn(rows, rank).mul_(0.01).bfloat16()
    save_file(tensors, folder / TENSORS_FILE)
    (folder / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    return folder


class Worker:
    """An engine with adapters loaded, which runs requests that decode."""

    def __init__(self, options: argparse.Namespace, folder: Path, adapter: Path) -> None:
        self.options = options
        limits = LoraLimits(
            max_per_batch=max(options.adapters),
            max_rank=options.rank,
            target_modules=target_modules(read_model_spec(folder), []),
        )
        most = max(options.batch)
        self.engine = InProcessEngine(
            folder,
            device=options.device,
            dtype="bfloat16",
            load_format="dummy",
            context_len=2048,
            max_total_tokens=most * 1024,
            max_running_requests=most,
            chunked_prefill_size=1024,
            overlap=options.device == "cuda",
            disable_radix_cache=True,
            num_threads=options.threads,
            lora=limits,
        )
        # The engine of tests computes with one thread.
        torch.set_num_threads(options.threads)
        for adapter_id in range(1, max(options.adapters) + 1):
            reply = self.engine.ask(LoadAdapter(adapter_id, str(adapter)))
            assert reply.success, reply.message
        self.vocab_size = read_model_spec(folder).vocab_size
        self.first = 1

    def step_seconds(self, batch: int, num_adapters: int) -> float:
        """Return the seconds of a decode step of `batch` rows; 0 adapters means the base model."""
        options, source = self.options, random.Random(batch)
        warm = 8
        for row in range(batch):
            prompt = [source.randrange(1, self.vocab_size) for _ in range(options.prompt)]
            adapter_id = row % num_adapters + 1 if num_adapters else 0
            length = options.steps + 4 * warm + batch
            self.engine.add(
                self.first + row, prompt, length, adapter_id=adapter_id, ignore_eos=True
            )
        table = self.engine.scheduler._table
        while table.is_decoding.sum() != batch:
            self.engine.scheduler.step()
        for _ in range(warm):
            self.engine.scheduler.step()
        self._synchronize()
        took_s = []
        for _ in range(options.steps):
            started = time.perf_counter()
            self.engine.scheduler.step()
            took_s.append(time.perf_counter() - started)
        self._synchronize()
        self.engine.run()
        self.first += batch
        return statistics.median(took_s)

    def prompt_seconds(self, num_adapters: int) -> float:
        """Return the seconds of a prompt of 1024 tokens; 0 adapters means the base model."""
        prompt = [7] * 1024
        self.engine.add(self.first, prompt, 1, adapter_id=num_adapters and 1, ignore_eos=True)
        self._synchronize()
        started = time.perf_counter()
        self.engine.run()
        self._synchronize()
        self.first += 1
        return time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as root:
        folder = write_shape(options.shape, Path(root) / "model")
        adapter = write_adapter(Path(root) / "adapter", folder, options.rank)
        worker = Worker(options, folder, adapter)
        for batch in options.batch:
            counts = [0, *(count for count in options.adapters if count <= batch)]
            best = dict.fromkeys(counts, float("inf"))
            for _ in range(options.repeat):
                for count in counts:
                    best[count] = min(best[count], worker.step_seconds(batch, count))
            for count in counts:
                kept, name = best[0] / best[count], f"{count} adapters" if count else "base"
                print(
                    f"batch {batch:3} {name:12} {best[count] * 1e3:8.3f} ms a step "
                    f"{batch / best[count]:9.1f} tokens/s  {kept:6.1%} of the base"
                )
                results[f"{batch}, {name}"] = {"step_ms": best[count] * 1e3, "kept": kept}
        prompts = {0: float("inf"), 1: float("inf")}
        for _ in range(options.repeat):
            for count in prompts:
                prompts[count] = min(prompts[count], worker.prompt_seconds(count))
        kept = prompts[0] / prompts[1]
        print(f"prompt of 1024: {1024 / prompts[1]:.0f} tokens/s, {kept:.1%} of the base")
        results["prompt"] = {"base_s": prompts[0], "adapter_s": prompts[1]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="0.5b", choices=sorted(SHAPES))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = measure(options)
    if options.json:
        write_json(options.json, {"environment": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
