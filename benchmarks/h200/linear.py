"""Checks and times products with few tokens on an H200: our kernel and cuBLAS.

The weights are used in turn, so that they are not in the L2 cache.
"""

import torch
from torch.nn import functional

from benchmarks.h200.timing import graph_us, relative_error
from kernels.linear import triton as ours

DEVICE = torch.device("cuda")
SHAPES = {  # out, in
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)],
    "0.5B": [(1152, 896), (896, 896), (9728, 896), (896, 4864), (151936, 896)],
}
TOKENS = (1, 4, 16, 32, 64)


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def check() -> list[str]:
    """Compare the products with float32; return the errors."""
    wrong = []
    for dtype in (torch.bfloat16, torch.float16):
        for out_features, in_features in [*SHAPES["0.5B"], (4096, 14336), (77, 1000)]:
            for tokens in (1, 7, 16, 20, 50, 64, 70):
                x, weight = (
                    random(tokens, in_features, dtype=dtype),
                    random(out_features, in_features),
                )
                weight = weight.to(dtype)
                bias = random(out_features, dtype=dtype)
                want = functional.linear(x.float(), weight.float(), bias.float())
                error = relative_error(ours.pack(weight, bias)(x), want)
                if not error < 1e-2:
                    wrong.append(f"linear {tokens} x {weight.shape} {dtype}: {error:.1e}")
    return wrong


def weights(shape) -> list[torch.Tensor]:
    count = max(2, min(64, 400_000_000 // (shape[0] * shape[1] * 2)))
    return [random(*shape) for _ in range(count)]


def measure() -> list[dict[str, object]]:
    """Time every shape with the tile that the kernel chooses, and with cuBLAS."""
    rows: list[dict[str, object]] = []
    for model, shapes in SHAPES.items():
        for shape in shapes:
            many = weights(shape)
            for tokens in TOKENS:
                x = random(tokens, shape[1])
                packed = [ours.pack(w, None) for w in many]
                took = graph_us([lambda p=p, x=x: p(x) for p in packed])
                cublas = graph_us([lambda w=w, x=x: functional.linear(x, w) for w in many])
                case = f"linear {tokens} x {shape[1]} -> {shape[0]}"
                moved = shape[0] * shape[1] * 2 / took / 1e3
                row = {"model": model, "case": case, "us": took, "cublas_us": cublas}
                rows.append({**row, "gb_per_s": moved})
    return rows


TILES = [ours.Tile(n, k, 4, s) for n, k, s in ((16, 256, 4), (32, 256, 4), (32, 128, 6))]
TILES += [ours.Tile(16, 256, 2, 4), ours.Tile(64, 128, 4, 4), ours.Tile(64, 64, 4, 6)]
TILES += [ours.Tile(64, 128, 8, 4), ours.Tile(128, 64, 4, 4), ours.Tile(128, 64, 8, 4)]
TILES += [ours.Tile(n, k, 4, 4, split) for n, k in ((32, 256), (64, 128)) for split in (2, 4, 8)]


def tune() -> list[dict[str, object]]:
    """Time all tiles of each shape, for 1 and for 16 tokens."""
    rows: list[dict[str, object]] = []
    for model, shapes in SHAPES.items():
        for shape in shapes:
            many = weights(shape)
            for tokens in (1, 16):
                x = random(tokens, shape[1])
                found = []
                for tile in TILES:
                    calls = [lambda w=w, x=x, t=tile: ours.run(x, w, None, t) for w in many]
                    try:
                        found.append((graph_us(calls, 5), str(tile)))
                    except Exception as error:
                        print(tile, type(error).__name__)
                found.sort()
                cublas = graph_us([lambda w=w, x=x: functional.linear(x, w) for w in many], 5)
                best = [f"{t:.2f}:{name[5:-1]}" for t, name in found[:5]]
                for text in ("block_", "num_", "stages=", "warps=", "n=", "k=", "split_"):
                    best = [b.replace(text, "").replace(", ", " ") for b in best]
                print(model, shape, tokens, f"cublas {cublas:.2f}", *best, sep=" | ", flush=True)
                rows.append({"model": model, "shape": shape, "tokens": tokens, "all": found})
            del many
    return rows
