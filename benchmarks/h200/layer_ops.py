"""Checks norm, activation and rope on an H200, and measures the bandwidth that they reach."""

import torch

from benchmarks.h200.timing import graph_us, relative_error
from kernels.activation import ACTIVATION
from kernels.norm import NORM
from kernels.rope import ROPE

DEVICE = torch.device("cuda")
# Each entry: hidden size, intermediate size, query heads, key heads, head size.
MODELS = {"8B": (4096, 14336, 32, 8, 128), "0.5B": (896, 4864, 14, 2, 64)}
TOKENS = (1, 8, 64, 256, 2048, 8192)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def rope_arguments(model, tokens, dtype=torch.bfloat16, normed=False):
    _, _, heads, kv_heads, dim = MODELS[model]
    pages = tokens // 16 + 2
    caches = [random(pages, kv_heads, 16, dim, dtype=dtype) for _ in "kv"]
    weights = [random(dim, dtype=dtype) if normed else None for _ in "qk"]
    slots = torch.randperm(pages * 16, device=DEVICE)[:tokens]
    slots[::5] = -1
    return (
        random(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype),
        *(heads, kv_heads, dim),
        random(9000, dim, dtype=torch.float32),
        torch.randint(0, 9000, (tokens,), device=DEVICE),
        *(slots, *caches, *weights, 1e-6),
    )


def check() -> list[str]:
    """Compare all ops with the references; return the errors."""
    wrong = []

    def compare(what, got, want, dtype):
        error = relative_error(got, want)
        if not error < {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]:
            wrong.append(f"{what} {dtype}: {error:.2e}")

    norms, norms_ref = NORM.load("triton"), NORM.load("reference")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for model, (hidden, inter, *_) in MODELS.items():
            for tokens in (1, 77):
                x, residual = (
                    random(tokens, hidden, dtype=dtype),
                    random(tokens, hidden, dtype=dtype),
                )
                weight = random(hidden, dtype=dtype)
                theirs = residual.clone()
                want = norms_ref.rms_norm(x, weight, 1e-5)
                compare("norm", norms.rms_norm(x, weight, 1e-5), want, dtype)
                want = norms_ref.fused_add_rms_norm(x, theirs, weight, 1e-5)
                compare(
                    "add norm", norms.fused_add_rms_norm(x, residual, weight, 1e-5), want, dtype
                )
                if not torch.equal(theirs, residual):
                    wrong.append(f"residual {dtype}")
                x = random(tokens, 2 * inter, dtype=dtype)
                want = ACTIVATION.load("reference").act_and_mul(x.float(), "silu")
                compare("silu", ACTIVATION.load("triton").act_and_mul(x, "silu"), want, dtype)
                for normed in (False, True):
                    args = rope_arguments(model, tokens, dtype, normed)
                    copy = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
                    ROPE.load("triton").rope_kv_write(*args)
                    ROPE.load("reference").rope_kv_write(*copy)
                    for i in (0, 7, 8):
                        compare(f"rope {i} {normed}", args[i], copy[i], dtype)
    return wrong


def measure() -> list[dict[str, object]]:
    """Time every op; the buffers are used in turn, so that large ones leave the cache."""
    rows: list[dict[str, object]] = []
    for model, (hidden, inter, heads, kv_heads, dim) in MODELS.items():
        for tokens in TOKENS:
            sets = 8
            x = [random(tokens, hidden) for _ in range(sets)]
            residual = [random(tokens, hidden) for _ in range(sets)]
            weight = random(hidden)
            calls = [
                lambda a=a, r=r, w=weight: NORM.load("triton").fused_add_rms_norm(a, r, w, 1e-5)
                for a, r in zip(x, residual, strict=True)
            ]
            rows.append(row(model, "add norm", tokens, graph_us(calls), 4 * tokens * hidden * 2))
            gate_up = [random(tokens, 2 * inter) for _ in range(sets)]
            calls = [lambda a=a: ACTIVATION.load("triton").act_and_mul(a, "silu") for a in gate_up]
            rows.append(row(model, "silu", tokens, graph_us(calls), 3 * tokens * inter * 2))
            width = (heads + 2 * kv_heads) * dim
            for normed in (False, True):
                many = [rope_arguments(model, tokens, normed=normed) for _ in range(sets)]
                calls = [lambda a=a: ROPE.load("triton").rope_kv_write(*a) for a in many]
                moved = tokens * (2 * width + kv_heads * dim) * 2
                name = "rope q/k norm" if normed else "rope"
                rows.append(row(model, name, tokens, graph_us(calls), moved))
    return rows


def row(model, case, tokens, took, moved) -> dict[str, object]:
    return {
        "model": model,
        "case": f"{case} {tokens}",
        "us": took,
        "gb_per_s": moved / took / 1e3,
    }
