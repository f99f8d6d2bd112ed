"""Times text embeddings on one GPU: the model alone, and a server with many clients.

    python -m benchmarks.h200.texts [--shape bge-m3 qwen3-embedding-0.6b] [--json FILE]

The weights are random, in bf16, and each text has `--length` tokens. The figure "step" is the
median time of one packed batch of `--step-tokens` tokens through the model in this process. Its
share is relative to `--peak` TFLOP/s, and counts two operations for each weight outside the
embeddings and the products of attention. The figure "http" is the number of texts per second over
`/v1/embeddings` in base64: `--clients` connections send `--texts` texts in all, one text per
request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from benchmarks.h200.server_process import running_server
from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import write_shape
from headrace.http_stream import HttpClient
from runtime.executor.staging import to_device
from runtime.models.attention.backend import ATTENTION_BACKENDS, StepLimits
from runtime.models.encoder_batch import EncoderBatch
from runtime.models.layers.build_context import BuildContext
from runtime.models.model import TextEncoder
from runtime.models.registry import model_class, read_model_spec
from runtime.weights.load_model import load_model

SHAPES = ("bge-m3", "qwen3-embedding-0.6b")


def flops(config: dict[str, Any], lengths: Sequence[int], *, is_causal: bool) -> float:
    """Return the operations of the layers for texts of the given lengths."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads", heads)
    products = hidden * head_dim * (2 * heads + 2 * kv_heads)
    products += hidden * inner * (3 if is_causal else 2)
    pairs = sum(length * (length + 1) // 2 if is_causal else length**2 for length in lengths)
    per_layer = 2 * products * sum(lengths) + 4 * heads * head_dim * pairs
    return float(config["num_hidden_layers"] * per_layer)


@torch.inference_mode()
def measure_step(folder: Path, lengths: list[int], repeat: int, device: torch.device) -> float:
    """Return the median seconds of one step with texts of the given lengths."""
    spec = read_model_spec(folder, is_embedding=True)
    context = BuildContext(dtype=torch.bfloat16, device=device)
    model = load_model(folder, spec, context, lambda _: None, load_format="dummy")
    assert isinstance(model, TextEncoder), model_class(spec)
    ids = np.random.default_rng(0).integers(4, 20_000, sum(lengths))
    places = np.concatenate([np.arange(length) for length in lengths])
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    batch = EncoderBatch(*to_device(device, ids, places), lengths, to_device(device, bounds)[0])
    if model.sees_backward_only:
        limits = StepLimits(len(lengths), sum(lengths), sum(lengths))
        name = "triton" if device.type == "cuda" else "torch"
        batch.attention = ATTENTION_BACKENDS.load(name)(device.type, limits)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = []
    for _ in range(repeat + 3):
        wait()
        began = time.perf_counter()
        model.compute(batch)
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[3:])


async def measure_http(shape: str, length: int, texts: int, clients: int) -> dict[str, float]:
    """Return the texts per second over HTTP, and the milliseconds of one request."""
    draw = np.random.default_rng(1)
    bodies = [
        json.dumps(
            {
                "model": shape,
                "input": draw.integers(4, 20_000, length).tolist(),
                "encoding_format": "base64",
            }
        ).encode()
        for _ in range(texts)
    ]
    options = ["--is-embedding", "--max-running-requests", "256"]
    async with running_server(shape, options) as server:
        client = HttpClient(server.url, {}, 300.0)

        async def send(waiting: list[bytes], took: list[float]) -> None:
            while waiting:
                body = waiting.pop()
                began = time.perf_counter()
                status, answer = await client.call("POST", "/v1/embeddings", body)
                assert status == 200, answer[:300]
                took.append(time.perf_counter() - began)

        found: dict[str, float] = {"ready_s": server.ready_s}
        for counted in (False, True):
            waiting, took = list(bodies), list[float]()
            began = time.perf_counter()
            await asyncio.gather(*(send(waiting, took) for _ in range(clients)))
            if counted:
                found["texts_per_s"] = texts / (time.perf_counter() - began)
                found["p50_ms"] = 1e3 * statistics.median(took)
        client.close()
    return found


def main() -> None:
    """Measure and print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=SHAPES)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--peak", type=float, default=782.0, help="TFLOP/s of a large product")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    results: dict[str, Any] = {}
    for shape in options.shape:
        rows: dict[str, Any] = {}
        with tempfile.TemporaryDirectory(prefix="bench-") as name:
            folder = write_shape(shape, Path(name) / shape)
            config = json.loads((folder / "config.json").read_text())
            count = options.step_tokens // options.length
            mixed = np.random.default_rng(2).integers(16, options.length + 1, 2 * count).tolist()
            for kind, lengths in (("equal", [options.length] * count), ("mixed", mixed)):
                took = measure_step(folder, lengths, options.repeat, device)
                work = flops(config, lengths, is_causal="Causal" in config["architectures"][0])
                rate = work / took / 1e12
                rows[kind] = {
                    "texts_per_s": len(lengths) / took,
                    "tokens_per_s": sum(lengths) / took,
                    "tflops": rate,
                    "share": rate / options.peak,
                }
                print(
                    f"{shape} step, {kind}: {len(lengths) / took:.0f} texts/s, {rate:.0f} TFLOP/s,"
                    f" {100 * rate / options.peak:.0f}%",
                    flush=True,
                )
        http = uvloop.run(measure_http(shape, options.length, options.texts, options.clients))
        rows["http"] = http
        print(f"{shape} http: {http['texts_per_s']:.0f} texts/s", flush=True)
        results[shape] = rows
    if options.json:
        write_json(options.json, {"environment": describe_environment(), "results": results})


if __name__ == "__main__":
    main()
