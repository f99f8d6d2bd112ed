"""Times products with quantized weights on a CPU, and compares them with reads of memory.

`python -m benchmarks.quantized_linear [--models 135m,0.5b] [--forms q4_0,q4_k] [--tokens 1,8]`

The figures for each model, form and number of tokens are: microseconds of all linear layers of one
layer and of the head, bytes of packed weights per second, and billions of multiplications per
second. Weights are random. There are copies for several layers, until they are far larger than the
caches, as in a model. With one row, the important figure is GB/s. It should be compared with
`read`: a sum over memory of the same size with the same threads, timed in turns with the products.
`process` is processor time, which other load on the machine changes less.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.cpu_kernels import machine
from kernels.linear import pack as pack_floats
from kernels.quantized_linear import FORMS, QuantizedLinear, StoredMatrix, pack
from kernels.quantized_linear.cpu import dots_name

# Each entry: hidden size, rows of the query-key-value weight, width of all heads, intermediate
# size, vocabulary.
MODELS = {
    "135m": (576, 960, 576, 1536, 49152),
    "0.5b": (896, 1152, 896, 4864, 151936),
}
# K forms need whole blocks of 256 values; other rows get these forms instead, as in llama.cpp.
FALLBACKS = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
FALLBACKS["iq4_xs"] = "iq4_nl"
WORKING_SET = 400_000_000


def stored(form: str, rows: int, columns: int) -> StoredMatrix:
    """Return a random matrix in a stored form, with scales of about 2^-10."""
    if columns % FORMS[form].block_values:
        form = FALLBACKS[form]
    layout = FORMS[form]
    blocks = rows * columns // layout.block_values
    if layout.block_values == 1:
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[form]
        return StoredMatrix(form, torch.randn(rows, columns).to(dtype).view(torch.uint8))
    raw = torch.randint(0, 256, (blocks, layout.block_bytes), dtype=torch.uint8)
    places = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": ()}
    for at in places.get(form, (0, 2) if form in ("q4_1", "q5_1", "q4_k", "q5_k") else (0,)):
        raw[:, at : at + 2] = torch.tensor([0, 0x14], dtype=torch.uint8)
    if form == "mxfp4":
        raw[:, 0] = 118
    return StoredMatrix(form, raw.view(rows, -1))


def layer(model: str, form: str) -> list[QuantizedLinear]:
    hidden, qkv, heads, inter, _ = MODELS[model]
    shapes = ((qkv, hidden), (hidden, heads), (2 * inter, hidden), (hidden, inter))
    return [pack([stored(form, *shape)], shape[1]) for shape in shapes]


def read_speed(num_bytes: int) -> Callable[[], object]:
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    return memory.sum


def measure(calls: dict[str, Callable[[], object]], budget_s: float) -> dict[str, dict[str, float]]:
    """Run the calls in turns; return the best and median wall and processor microseconds."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    busy: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + budget_s
    while time.perf_counter() < end or len(next(iter(wall.values()))) < 5:
        for name, call in calls.items():
            start, start_busy = time.perf_counter(), time.process_time()
            call()
            wall[name].append((time.perf_counter() - start) * 1e6)
            busy[name].append((time.process_time() - start_busy) * 1e6)
    return {
        name: {
            "best": min(wall[name]),
            "median": statistics.median(wall[name]),
            "process": min(busy[name]),
        }
        for name in calls
    }


def run_all(weights: list[QuantizedLinear], inputs: dict[int, Tensor]) -> Callable[[], object]:
    """Return a function that computes all products one after another."""
    pairs = [(w, inputs[w.in_features], torch.empty(0)) for w in weights]
    outs = [(w, x, x.new_empty(len(x), w.out_features)) for w, x, _ in pairs]

    def call() -> None:
        for weight, x, out in outs:
            weight.write(x, out)

    return call


def figures(
    model: str, form: str, tokens: int, budget_s: float, dtype: torch.dtype
) -> dict[str, object]:
    """Measure one form with one number of tokens."""
    hidden, _, heads, inter, vocab = MODELS[model]
    first = layer(model, form)
    size = sum(weight.size_bytes for weight in first)
    count = max(1, min(WORKING_SET // size, 24)) if tokens <= 32 else 1
    layers = first + [weight for _ in range(count - 1) for weight in layer(model, form)]
    inputs = {width: torch.randn(tokens, width).to(dtype) for width in {hidden, heads, inter}}
    calls = {"layers": run_all(layers, inputs)}
    head = pack([stored(form, vocab, hidden)], hidden) if tokens <= 32 else None
    if head is not None:
        calls["head"] = run_all([head], inputs)
    bytes_of = {"layers": size * count}
    values_of = {"layers": sum(w.in_features * w.out_features for w in first) * count}
    if head is not None:
        bytes_of["head"], values_of["head"] = head.size_bytes, vocab * hidden
    if tokens == 1:
        calls["read"] = read_speed(size * count)
        bytes_of["read"] = size * count
    line: dict[str, object] = {"model": model, "form": form, "tokens": tokens, "layers": count}
    for name, times in measure(calls, budget_s).items():
        line[name] = {
            **times,
            "GB/s": bytes_of[name] / times["best"] / 1e3,
            "G/s": values_of.get(name, 0) * tokens / times["best"] / 1e3,
        }
    return line


def floats(model: str, tokens: int, budget_s: float, dtype: torch.dtype) -> dict[str, object]:
    """Measure the same layer with unquantized weights, in the kernels of `kernels.linear`."""
    hidden, qkv, heads, inter, _ = MODELS[model]
    shapes = ((qkv, hidden), (hidden, heads), (2 * inter, hidden), (hidden, inter))
    size = sum(rows * columns for rows, columns in shapes) * dtype.itemsize
    count = max(1, min(WORKING_SET // size, 24)) if tokens <= 32 else 1
    weights = [pack_floats(torch.randn(shape).to(dtype)) for _ in range(count) for shape in shapes]
    inputs = {width: torch.randn(tokens, width).to(dtype) for width in {hidden, heads, inter}}

    def call() -> None:
        for weight in weights:
            weight(inputs[weight.in_features])

    times = measure({"layers": call}, budget_s)["layers"]
    work = sum(rows * columns for rows, columns in shapes) * count * tokens
    speed = {"GB/s": size * count / times["best"] / 1e3, "G/s": work / times["best"] / 1e3}
    name = f"{str(dtype).removeprefix('torch.')} of kernels.linear"
    line: dict[str, object] = {"model": model, "form": name, "tokens": tokens, "layers": count}
    return {**line, "layers": {**times, **speed}}


def show(line: dict[str, object]) -> None:
    parts = [f"{line['model']:5s} {line['form']:26s} T={line['tokens']:<4}"]
    for name in ("layers", "head", "read"):
        found = line.get(name)
        if isinstance(found, dict):
            parts.append(
                f"{name} {found['median']:9.0f} us (best {found['best']:9.0f}, process"
                f" {found['process']:9.0f}) {found['GB/s']:5.1f} GB/s {found['G/s']:6.0f} G/s"
            )
    print("  ".join(parts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--forms", default="q4_0,q4_1,q4_k,q5_0,q6_k,q8_0,bf16")
    parser.add_argument("--tokens", default="1,8,32,512")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=0, help="torch threads; 0 leaves them")
    parser.add_argument("--budget", type=float, default=1.0, help="seconds per line")
    parser.add_argument("--json", type=Path, help="write the figures here as well")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    about = {**machine(), "dots": dots_name(), **{k: str(v) for k, v in vars(options).items()}}
    print(" ".join(f"{key}={value}" for key, value in about.items()))
    results = []
    for model in options.models.split(","):
        for tokens in map(int, options.tokens.split(",")):
            for form in options.forms.split(","):
                results.append(figures(model, form, tokens, options.budget, dtype))
                show(results[-1])
            results.append(floats(model, tokens, options.budget, dtype))
            show(results[-1])
    if options.json:
        options.json.write_text(json.dumps({"about": about, "results": results}, indent=1))


if __name__ == "__main__":
    main()
