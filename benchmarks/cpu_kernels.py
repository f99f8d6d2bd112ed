"""Times every CPU kernel against plain torch at the shapes of two models.

Run: python -m benchmarks.cpu_kernels [--only linear,attention] [--threads 2] [--json out.json]

"small" has hidden size 384, 6 heads and 2 key/value heads of 64, intermediate size 1024 and a
vocabulary of 8192. "0.5b" has hidden size 896, 14 heads and 2 key/value heads of 64, intermediate
size 4864 and a vocabulary of 151936. A figure is the median of the repeats in microseconds. The
candidates of a shape alternate, so that other load on the machine affects all of them.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import ACTIVATION
from kernels.cpu import library
from kernels.linear import LINEAR, pack
from kernels.norm import NORM
from kernels.paged_attention import PAGED_ATTENTION
from kernels.rope import ROPE
from kernels.sampling import SamplingRows, sample

Candidates = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Model:
    """The shapes of one model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.head_dim


MODELS = (
    Model("small", 384, 6, 2, 64, 1024, 8192),
    Model("0.5b", 896, 14, 2, 64, 4864, 151936),
)
PAGE_SIZE = 16


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def linear_cases(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Candidates]]:
    layers = {
        "qkv": (model.qkv, model.hidden),
        "o": (model.hidden, model.heads * model.head_dim),
        "gate_up": (2 * model.intermediate, model.hidden),
        "down": (model.hidden, model.intermediate),
        "head": (model.vocab, model.hidden),
    }
    for layer, (out_features, in_features) in layers.items():
        weight = random(out_features, in_features, dtype=dtype)
        packed = {name: pack(weight, None, name) for name in LINEAR if not LINEAR.unavailable(name)}
        for tokens in (1, 2, 4, 8, 16, 32, 512):
            if layer == "head" and tokens > 32:
                continue
            x = random(tokens, in_features, dtype=dtype)
            yield (
                f"{layer} {out_features}x{in_features} T={tokens}",
                {name: (lambda one=one, x=x: one(x)) for name, one in packed.items()},
            )


def attention_cases(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Candidates]]:
    heads, kv_heads, dim = model.heads, model.kv_heads, model.head_dim
    ours = PAGED_ATTENTION.choose("cpu").kernels
    for batch, new, length in (
        *((1, 1, 128), (1, 1, 1024), (1, 1, 4096), (8, 1, 512), (32, 1, 512)),
        *((1, 128, 128), (1, 1024, 1024), (1, 256, 1024)),
    ):
        pages = -(-length // PAGE_SIZE)
        table = torch.randperm(batch * pages).to(torch.int32).view(batch, pages)
        shape = (batch * pages, kv_heads, PAGE_SIZE, dim)
        k_cache, v_cache = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
        qkv = random(batch * new, model.qkv, dtype=dtype)
        q = qkv.view(batch * new, -1, dim)[:, :heads]
        lens = torch.full((batch,), length, dtype=torch.int32)
        indptr = torch.arange(0, batch * new + 1, new, dtype=torch.int32)
        args = (q, k_cache, v_cache, table, lens, indptr, dim**-0.5, -1, None)
        candidates: Candidates = {"ours": lambda args=args: ours.paged_attention(*args)}
        # torch gets its keys in a dense tensor without a block table, which is not timed.
        k, v = (random(batch, kv_heads, length, dim, dtype=dtype) for _ in "kv")
        dense_q = random(batch, heads, new, dim, dtype=dtype)
        mask = None
        if 1 < new < length:
            mask = torch.ones(new, length, dtype=torch.bool).tril(length - new)
        candidates["sdpa"] = lambda q=dense_q, k=k, v=v, mask=mask, causal=new == length: (
            functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True
            )
        )
        yield f"batch={batch} queries={new} keys={length}", candidates


def layer_cases(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Candidates]]:
    norms = {name: NORM.load(name) for name in ("cpu", "reference") if not NORM.unavailable(name)}
    acts = {name: ACTIVATION.load(name) for name in norms}
    ropes = {name: ROPE.load(name) for name in norms}
    weight = random(model.hidden, dtype=dtype)
    cos_sin = torch.randn(4096, model.head_dim)
    for tokens in (1, 8, 32, 1024):
        x, residual = (random(tokens, model.hidden, dtype=dtype) for _ in "xr")
        gate_up = random(tokens, 2 * model.intermediate, dtype=dtype)
        qkv = random(tokens, model.qkv, dtype=dtype)
        pages = -(-tokens // PAGE_SIZE)
        cache = random(pages, model.kv_heads, PAGE_SIZE, model.head_dim, dtype=dtype)
        at = torch.arange(tokens)
        rope = (
            *(qkv, model.heads, model.kv_heads, model.head_dim, cos_sin, at, at),
            *(cache, cache.clone(), None, None, 1e-6),
        )
        yield (
            f"rms_norm T={tokens}",
            {n: (lambda k=k, x=x: k.rms_norm(x, weight, 1e-6)) for n, k in norms.items()},
        )
        yield (
            f"fused_add_rms_norm T={tokens}",
            {
                n: (lambda k=k, x=x, r=residual: k.fused_add_rms_norm(x, r, weight, 1e-6))
                for n, k in norms.items()
            },
        )
        yield (
            f"silu_and_mul T={tokens}",
            {n: (lambda k=k, x=gate_up: k.act_and_mul(x, "silu")) for n, k in acts.items()},
        )
        yield (
            f"rope_kv_write T={tokens}",
            {n: (lambda k=k, a=rope: k.rope_kv_write(*a)) for n, k in ropes.items()},
        )


def sampling_cases(model: Model, dtype: torch.dtype) -> Iterator[tuple[str, Candidates]]:
    for batch in (1, 32):
        logits = (torch.randn(batch, model.vocab) * 3).to(dtype).float()
        for name, temperature, top_k, top_p in (
            ("greedy", 0.0, -1, 1.0),
            ("temperature", 1.0, -1, 1.0),
            ("top_k 50", 1.0, 50, 1.0),
            ("top_p 0.9", 0.6, -1, 0.9),
        ):
            rows = SamplingRows(
                temperature=torch.full((batch,), temperature),
                top_k=torch.full((batch,), top_k, dtype=torch.int32),
                top_p=torch.full((batch,), top_p),
                min_p=torch.zeros(batch),
                seed=torch.arange(batch),
                position=torch.arange(batch),
                all_greedy=temperature == 0,
                any_top_k=top_k > 0,
                any_top_p=top_p < 1,
                max_top_k=max(top_k, 0),
            )
            probs = torch.softmax(logits, -1)
            yield (
                f"{name} batch={batch}",
                {
                    "ours": lambda logits=logits, rows=rows: sample(logits, rows),
                    "full sort alone": lambda p=probs: p.sort(-1, descending=True),
                },
            )


CASES = {
    "linear": linear_cases,
    "attention": attention_cases,
    "layer": layer_cases,
    "sampling": sampling_cases,
}


def medians_us(candidates: Candidates, budget_s: float) -> dict[str, float]:
    """Time the candidates alternately, for about `budget_s` seconds in total."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for call in candidates.values():
        call()
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, call in candidates.items():
            # The first call after another candidate finds a cold cache and is not counted.
            call()
            for _ in range(3):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e6 for name, values in times.items()}


def machine() -> dict[str, object]:
    name = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    return {
        "cpu": name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "library": library.unavailable() or "built",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(CASES), help="parts to run, comma separated")
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves them")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds per line")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    about = {**machine(), **{k: str(v) for k, v in vars(options).items()}}
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    results = []
    for part in options.only.split(","):
        for model in MODELS:
            if model.name not in options.models.split(","):
                continue
            print(f"\n{part}, {model.name}: microseconds")
            for label, candidates in CASES[part](model, getattr(torch, options.dtype)):
                times = medians_us(candidates, options.budget)
                shown = "  ".join(f"{name} {us:10.1f}" for name, us in times.items())
                print(f"  {label:32s} {shown}", flush=True)
                results.append({"part": part, "model": asdict(model), "case": label, "us": times})
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
