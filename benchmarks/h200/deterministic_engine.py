"""Checks that the whole worker is deterministic, for `benchmarks.h200.deterministic`."""

from __future__ import annotations

import gc
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.bench.shapes import SHAPES, write_shape
from tests.support.deterministic import NUM_REQUESTS, Result, Workload, without_prompts
from tests.support.engine import InProcessEngine

Found = tuple[list[str], list[str]]
WAYS: dict[str, dict[str, Any]] = {
    "graphs, overlap": {},
    "graphs": {"overlap": False},
    "eager": {"overlap": False, "disable_cuda_graph": True},
    "chunks of 37": {"chunked_prefill_size": 37},
    "retracted": {"max_total_tokens": 0},
}
STEPS = 60


def make_engine(folder: Path, **options: Any) -> InProcessEngine:
    gc.collect()
    torch.cuda.empty_cache()
    defaults: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "max_running_requests": NUM_REQUESTS,
        "chunked_prefill_size": 8192,
        "overlap": True,
        "deterministic": True,
    }
    return InProcessEngine(folder, **(defaults | options))


def different(found: list[Result], expected: list[Result]) -> str:
    """Describe how many results differ and in which part; empty if all are equal."""
    pairs = list(zip(found, expected, strict=True))
    counts = {
        name: sum(one[part] != other[part] for one, other in pairs)
        for part, name in enumerate(("tokens", "output logprobs", "prompt logprobs"))
    }
    return ", ".join(f"{name} of {count}" for name, count in counts.items() if count)


def check(name: str, folder: Path, work: Workload, pool: int, options: dict[str, Any]) -> Found:
    """Run one model under every way of scheduling; return the errors and the printed lines.

    With the flag all results must agree; without it some should differ.
    """
    wrong: list[str] = []
    lines: list[str] = []
    options = {"max_total_tokens": 40 * pool, **options}
    for deterministic in (True, False):
        common = options | {"deterministic": deterministic}
        # Each request runs alone and eagerly: without a graph, padding, other requests or a prefix
        # cache.
        plain = {"overlap": False, "disable_cuda_graph": True, "disable_radix_cache": True}
        alone = work.one_by_one(make_engine(folder, **(common | plain)))
        assert all(len(tokens) == work.num_new for tokens, _, _ in alone)
        told = []
        for way, extra in WAYS.items():
            changed = dict(extra)
            if way == "retracted":
                changed["max_total_tokens"] = pool
            engine = make_engine(folder, **(common | changed))
            told.append((way, different(work.together(engine), alone)))
            if way == "retracted" and not engine.shared["num_retractions_total"]:
                wrong.append(f"{name}: nothing was retracted")
            if way == "graphs, overlap":
                expected = without_prompts(alone)
                for first_id in (101, 201):
                    found = work.together(engine, first_id, of_prompt=False)
                    told.append((f"cached, {first_id}", different(found, expected)))
                if engine.cached[201 + NUM_REQUESTS - 1] < work.shared // 2:
                    wrong.append(f"{name}: nothing was cached")
            del engine
        text = "; ".join(f"{way}: {what}" for way, what in told if what) or "nothing differs"
        if deterministic:
            wrong += [f"{name}, {way}: differ {what}" for way, what in told if what]
        lines.append(f"{name} {'with' if deterministic else 'without'} the flag: {text}")
        print(lines[-1], flush=True)
    return wrong, lines


def engine() -> Found:
    """Check tiny models and the 0.5b shape; return the errors and the printed lines."""
    from tests.support.tiny_models import tiny_model

    wrong: list[str] = []
    lines: list[str] = []
    tiny = Workload()
    for name, dtype in (
        ("qwen3", "bfloat16"),
        ("mistral_window", "bfloat16"),
        ("llama_biased", "float16"),
        ("qwen3", "float32"),
    ):
        found = check(f"{name} {dtype}", tiny_model(name), tiny, 480, {"dtype": dtype})
        wrong, lines = wrong + found[0], lines + found[1]
    folder = write_shape("0.5b", Path(tempfile.mkdtemp(prefix="shape-")) / "model")
    large = Workload(SHAPES["0.5b"]["vocab_size"], 640, 900, 96)
    options = {"load_format": "dummy", "context_len": 4096}
    found = check("0.5b bfloat16", folder, large, 3000, options)
    return wrong + found[0], lines + found[1]


def step_ms(engine: InProcessEngine, vocab_size: int, first_id: int, batch: int) -> float:
    """Return the milliseconds of one decode step after prompts of 512 tokens."""
    rng = np.random.default_rng(0)
    ids = range(first_id, first_id + batch)
    for request_id in ids:
        prompt = rng.integers(1, vocab_size, 512).tolist()
        engine.add(request_id, prompt, STEPS + 40, ignore_eos=True)
    while not all(len(engine.tokens.get(i, ())) >= 10 for i in ids):
        engine.scheduler.step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.scheduler.step()
    torch.cuda.synchronize()
    took = (time.perf_counter() - began) / STEPS * 1e3
    engine.run()
    return took


def prompt_s(engine: InProcessEngine, vocab_size: int, first_id: int) -> float:
    """Return the seconds for 16 prompts of 2048 tokens with one output token each.

    The prompts run three times; the first run warms up, and the faster of the others counts.
    """
    rng = np.random.default_rng(first_id)
    times = []
    for turn in range(3):
        for i in range(16):
            prompt = rng.integers(1, vocab_size, 2048).tolist()
            engine.add(first_id + 16 * turn + i, prompt, 1, ignore_eos=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        engine.run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return min(times[1:])


def cost() -> Found:
    """Time steps with and without the flag; return no errors, and the printed lines."""
    lines = []
    for shape in ("0.5b", "8b"):
        folder = write_shape(shape, Path(tempfile.mkdtemp(prefix="shape-")) / "model")
        vocab_size = SHAPES[shape]["vocab_size"]
        figures: dict[bool, dict[str, float]] = {}
        for deterministic in (False, True):
            engine = make_engine(
                folder,
                load_format="dummy",
                context_len=8192,
                max_total_tokens=200_000,
                max_running_requests=256,
                deterministic=deterministic,
            )
            found = {
                f"decode {batch}, ms": step_ms(engine, vocab_size, 1000 * batch, batch)
                for batch in (1, 16, 64, 256)
            }
            found["16 x 2048 tokens in, s"] = prompt_s(engine, vocab_size, 500_000)
            figures[deterministic] = found
            del engine
        for what, usual in figures[False].items():
            flagged = figures[True][what]
            lines.append(f"{shape} {what}: {usual:.3f} -> {flagged:.3f} ({flagged / usual:.2f}x)")
            print(lines[-1], flush=True)
    return [], lines
