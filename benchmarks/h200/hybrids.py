"""Times decode steps and prompts of Qwen3-Next's layers on one GPU, in process.

    python -m benchmarks.h200.hybrids --layers 4 --batch 64 [--kernels 12]

Layers, heads and experts have the sizes of Qwen3-Next 80B-A3B. Only the number of layers is
smaller, so that random weights fit into memory; as in the real model, one layer in four has
attention. The printed bound counts what a decode step must move through memory once: the weights of
the experts that the batch is expected to choose, all other weights, the recurrent states (read and
written), and the keys and values. `--kernels` lists the longest kernels of a prompt, and the share
of matrix products in the time of all kernels.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.checkpoint.model_spec import PagedState
from runtime.models.registry import read_model_spec
from tests.support.engine import InProcessEngine

# Bytes per second of an H200's memory, measured as the reads and writes of a 4 GiB copy.
COPY_BYTES_S = 4.2e12
PAGE = 16
# Names of kernels that compute products of linear layers or experts.
PRODUCT = re.compile("nvjet|gemm|cutlass|linear_kernel|product_kernel|gated_kernel|gemv")


def write_config(folder: Path, num_layers: int) -> None:
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": num_layers,
        "torch_dtype": "bfloat16",
        "vocab_size": 151_936,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))


def bound_bytes(spec: Any, batch: int, context: int) -> float:
    """Return the least number of bytes that one decode step must move through memory."""
    experts = spec.experts
    share = 1 - (1 - experts.num_chosen / experts.num_experts) ** batch
    of_experts = 3 * spec.hidden_size * experts.intermediate_size * experts.num_experts
    of_experts *= len(experts.layers)
    embedding = spec.vocab_size * spec.hidden_size
    weights = spec.num_parameters - embedding - of_experts * (1 - share)
    keys = sum(
        2 * state.num_kv_heads * state.head_dim * 2
        for state in spec.layer_states
        if isinstance(state, PagedState)
    )
    return 2 * weights + batch * (2 * spec.state_slot_bytes(1, 2) + context * keys)


def steps(engine: InProcessEngine, num: int) -> float:
    """Return the seconds of a step, as the mean of `num` steps."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(num):
        engine.scheduler.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / num


def print_kernels(engine: InProcessEngine, prompt: list[int], num: int) -> None:
    """Print the `num` longest kinds of kernels of a prompt, and the share of matrix products."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        engine.generate(prompt, 1, ignore_eos=True)
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name] += event.time_range.elapsed_us()
    products = sum(us for name, us in times.items() if PRODUCT.search(name))
    print(
        f"kernels of the prompt: {times.total() / 1e3:.1f} ms, "
        f"{products / times.total():.0%} of them in matrix products"
    )
    for name, us in times.most_common(num):
        print(f"  {us / 1e3:7.3f} ms {name[:70]}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kernels", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--prompt", type=int, default=8192)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_config(folder, args.layers)
        spec = read_model_spec(folder)
        engine = InProcessEngine(
            folder,
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            context_len=20_000,
            max_total_tokens=64 * 4096,
            max_running_requests=64,
            chunked_prefill_size=args.prompt,
            overlap=True,
            tokenizer_folder="",
        )
        rng = np.random.default_rng(0)
        context, next_id = 512, 1
        for batch in args.batch:
            for _ in range(batch):
                prompt = rng.integers(3, 1000, context).tolist()
                engine.add(next_id, prompt, 200, ignore_eos=True)
                next_id += 1
            steps(engine, 40)
            took = steps(engine, 60)
            least = bound_bytes(spec, batch, context) / COPY_BYTES_S
            print(
                f"decode, batch {batch}: {took * 1e3:.3f} ms; bytes' bound {least * 1e3:.3f} ms: "
                f"{least / took:.0%}"
            )
            engine.run()
        prompt = rng.integers(3, 1000, 2 * args.prompt).tolist()
        for title, length in (("computed", args.prompt), ("cached before", 2 * args.prompt)):
            started = time.perf_counter()
            engine.generate(prompt[:length], 1, ignore_eos=True)
            took = time.perf_counter() - started
            print(f"prompt of {length} ({title}): {took * 1e3:.1f} ms")
        if args.kernels:
            print_kernels(engine, rng.integers(3, 1000, args.prompt).tolist(), args.kernels)
        started = time.perf_counter()
        engine.generate(prompt + prompt[:60], 1, ignore_eos=True)
        print(
            f"turn of 60 new tokens after {len(prompt)} cached: "
            f"{(time.perf_counter() - started) * 1e3:.1f} ms; "
            f"{engine.cached[max(engine.cached)]} found"
        )


if __name__ == "__main__":
    main()
