"""Checks and times attention over whole prompts on an H200.

It compares cuDNN, which reads q, k and v directly, with our kernel, which reads KV cache pages.
"""

import time

import torch

from benchmarks.h200.attention import SHAPES, flops, make_step, planned, runs
from benchmarks.h200.timing import graph_us, relative_error
from kernels.prompt_attention import PROMPT_ATTENTION

DEVICE = torch.device("cuda")
LENGTHS = {
    "1x256": [256],
    "1x512": [512],
    "1x1024": [1024],
    "1x2048": [2048],
    "1x4096": [4096],
    "2x4096": [4096] * 2,
    "1x8192": [8192],
    "16x512": [512] * 16,
    "8x1024": [1024] * 8,
    "3000": [3000],
    "2 ragged near 4096": [4000, 4100],
}


def views(shape, tokens, dtype=torch.bfloat16):
    """Return random q, k and v as views of one qkv tensor."""
    heads, kv_heads, dim = shape
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, device=DEVICE, dtype=dtype)
    return qkv.split([heads, kv_heads, kv_heads], dim=1)


def check() -> list[str]:
    """Compare cuDNN's results with the reference; return the errors."""
    wrong = []
    cudnn, reference = PROMPT_ATTENTION.load("cudnn"), PROMPT_ATTENTION.load("reference")
    for name, shape in SHAPES.items():
        for dtype, limit in ((torch.bfloat16, 1e-2), (torch.float16, 2e-3)):
            for lengths in ([700], [512, 512, 333, 1025], [64, 1]):
                q, k, v = views(shape, sum(lengths), dtype)
                got = cudnn.prompt_attention(q, k, v, lengths, shape[2] ** -0.5)
                want = reference.prompt_attention(q, k, v, lengths, shape[2] ** -0.5)
                error = relative_error(got, want)
                if not error < limit:
                    wrong.append(f"prompt attention {name} {dtype} {lengths}: {error:.1e}")
    return wrong


def measure() -> list[dict[str, object]]:
    """Time both, and the host's part of a call, and the first call with a new length."""
    rows: list[dict[str, object]] = []
    cudnn = PROMPT_ATTENTION.load("cudnn")
    for name, shape in SHAPES.items():
        scale = shape[2] ** -0.5
        for case, lengths in LENGTHS.items():
            seqs = [(length, length) for length in lengths]
            step = make_step(shape, seqs, 4)
            paged = graph_us(runs(shape, step, planned(shape, step)))
            many = [views(shape, sum(lengths)) for _ in range(4)]
            took = graph_us(
                [
                    lambda q=q, k=k, v=v, n=lengths, s=scale: cudnn.prompt_attention(q, k, v, n, s)
                    for q, k, v in many
                ]
            )
            row = {"model": name, "case": f"prompt {case}", "us": took, "paged_us": paged}
            rows.append({**row, "tflop_per_s": flops(shape, seqs) / took / 1e6})
        first = []
        for length in range(3000, 8100, 512):
            q, k, v = views(shape, length)
            torch.cuda.synchronize()
            started = time.perf_counter()
            cudnn.prompt_attention(q, k, v, [length], scale)
            torch.cuda.synchronize()
            first.append((time.perf_counter() - started) * 1e6)
        q, k, v = views(shape, 640)
        for _ in range(3):
            cudnn.prompt_attention(q, k, v, [640], scale)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(50):
            cudnn.prompt_attention(q, k, v, [640], scale)
        host = (time.perf_counter() - started) * 1e6 / 50
        torch.cuda.synchronize()
        row = {"model": name, "case": "prompt, a new length", "us": sorted(first)[5]}
        rows.append({**row, "worst_us": max(first), "host_us": host})
    return rows
