"""Checks and profiles the worker alone on one GPU, without other processes.

    python -m benchmarks.h200.engine_in_process --checks --profile 0.5b 8b

The checks compare greedy tokens of tiny random models with those of `transformers` in float32. They
cover models with a family of their own and without one, with and without graphs and overlap, and
with chunked and retracted requests. The profile shows the device's kernels and the host's functions
in decode steps at batch 1, 64 and 256, and in prompt steps.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.shapes import SHAPES, write_shape
from runtime.ipc.messages import GenerateRequest
from runtime.requests.request_spec import RequestSpec, RowSpec
from runtime.requests.sampling_params import SamplingParams
from tests.support.engine import InProcessEngine


def engine(folder: Path, **options: Any) -> InProcessEngine:
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "context_len": 8192,
        "max_total_tokens": None,
        "max_running_requests": 256,
        "chunked_prefill_size": 8192,
        "overlap": True,
        "log_level": "info",
    }
    return InProcessEngine(folder, **(defaults | options))


def check_against_transformers() -> None:
    from transformers import AutoModelForCausalLM

    from tests.support.adapted_models import ADAPTED_MODELS, adapted_model
    from tests.support.tiny_models import tiny_model

    folders = {name: tiny_model(name) for name in ("llama", "qwen2", "qwen3")}
    folders |= {name: adapted_model(name) for name in ADAPTED_MODELS}
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 500, 3 + 9 * i).tolist() for i in range(12)]
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        expected = []
        for prompt in prompts:
            ids = torch.tensor([prompt])
            with torch.no_grad():
                made = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=48,
                    min_new_tokens=48,
                    do_sample=False,
                    pad_token_id=0,
                    eos_token_id=None,
                )
            expected.append(made[0, len(prompt) :].tolist())
        ways: dict[str, dict[str, Any]] = {
            "graph+overlap": {"overlap": True},
            "graph": {"overlap": False},
            "eager": {"overlap": False, "disable_cuda_graph": True},
            "chunked": {"overlap": True, "chunked_prefill_size": 17},
            "retracted": {"overlap": True, "max_total_tokens": 640},
        }
        for way, options in ways.items():
            ours = engine(
                folder,
                **{
                    "load_format": "auto",
                    "dtype": "float32",
                    "context_len": 256,
                    "max_total_tokens": 4096,
                    "max_running_requests": 16,
                    "chunked_prefill_size": 256,
                }
                | options,
            )
            for i, prompt in enumerate(prompts, 1):
                ours.add(i, prompt, 48, ignore_eos=True)
            ours.run()
            wrong = [i for i in range(1, 13) if ours.tokens[i] != expected[i - 1]]
            sampled = ours.generate(prompts[3], 30, temperature=1.0, top_k=20, top_p=0.9, seed=5)
            again = ours.generate(prompts[3], 30, temperature=1.0, top_k=20, top_p=0.9, seed=5)
            print(f"check {name:12} {way:14} wrong: {wrong} sampled repeats: {sampled == again}")


def add(ours: InProcessEngine, first_id: int, prompts: list[Any], num_new: int) -> None:
    ours.scheduler.receive(
        GenerateRequest(
            request_id=first_id + i,
            input_ids=np.asarray(prompt, dtype=np.int32).tobytes(),
            spec=RequestSpec(
                row=RowSpec(
                    sampling=SamplingParams(
                        max_new_tokens=num_new, temperature=0.0, ignore_eos=True, seed=1
                    )
                )
            ),
            arrival=float(first_id + i),
        )
        for i, prompt in enumerate(prompts)
    )


def host_profile(ours: InProcessEngine, batch: int, steps: int = 20) -> None:
    """Print the host's time per step, and its most expensive functions.

    The time is measured without the profiler, because the profiler adds its own cost.
    """
    started = time.perf_counter()
    for _ in range(steps):
        ours.scheduler.step()
    torch.cuda.synchronize()
    print(f"-- batch {batch}: {(time.perf_counter() - started) / steps * 1e3:.3f} ms a step")
    calls = cProfile.Profile()
    calls.enable()
    for _ in range(steps):
        ours.scheduler.step()
    calls.disable()
    stream = io.StringIO()
    pstats.Stats(calls, stream=stream).sort_stats("tottime").print_stats(14)
    print("\n".join(stream.getvalue().splitlines()[7:]))


def profile(shape: str) -> None:
    """Print how the device spends its time in decode steps and prompt steps."""
    folder = Path(tempfile.mkdtemp(prefix="shape-"))
    write_shape(shape, folder)
    ours = engine(folder, max_total_tokens=400_000)
    vocab = SHAPES[shape]["vocab_size"]
    rng = np.random.default_rng(0)
    next_id = 1
    for batch, length, new, steps in (
        (1, 512, 60, 40),
        (64, 32, 512, 40),
        (256, 512, 120, 40),
        (8, 4096, 1, 4),
    ):
        add(ours, next_id, [rng.integers(1, vocab, length) for _ in range(batch)], new)
        next_id += batch
        if new > 1:
            while int(ours.scheduler._table.is_decoding.sum()) != batch:
                ours.scheduler.step()
            for _ in range(5):
                ours.scheduler.step()
        torch.cuda.synchronize()
        if new > 1:
            host_profile(ours, batch)
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        started = time.perf_counter()
        with torch.profiler.profile(activities=activities) as trace:
            for _ in range(steps):
                ours.scheduler.step()
            torch.cuda.synchronize()
        wall = time.perf_counter() - started
        kernels = [
            e for e in trace.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA
        ]
        total = sum(e.self_device_time_total for e in kernels) / 1e3
        print(
            f"-- {shape} batch {batch} x {length}: {steps} steps, GPU {total:.2f} ms busy of "
            f"{wall * 1e3:.2f} ms"
        )
        for e in sorted(kernels, key=lambda e: -e.self_device_time_total)[:16]:
            print(
                f"   {e.self_device_time_total / 1e3 / steps:8.4f} ms/step "
                f"x{e.count / steps:6.1f}  {e.key[:90]}"
            )
        ours.run()


def main() -> None:
    """Run the requested checks and profiles."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checks", action="store_true")
    parser.add_argument("--profile", nargs="*", default=[], choices=list(SHAPES))
    options = parser.parse_args()
    if options.checks:
        check_against_transformers()
    for shape in options.profile:
        profile(shape)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
