"""Measures the limits of the GPU, and how close a decode step and a prompt come to these limits.

    python -m benchmarks.h200.ceilings [--results benchmarks/results/h200] [--json FILE]

A large copy gives the rate of the memory (bytes read plus bytes written). A large bf16 product
gives the rate of the matrix units. The results of `benchmarks.h200.run` are read from `8b.json`,
`0.5b.json` and `moe.json`. Their case A shows how fast a decode step reads its weights and keys;
their case D shows how fast prompts are computed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.bench.environment import describe_environment, write_json
from headrace.bench.shapes import SHAPES

COPY_BYTES = 4 * 2**30
MATRIX_SIZE = 8192


def seconds(work: Callable[[], object], times: int = 10) -> float:
    """Return the device seconds of one call, as the median of `times` calls."""
    taken = []
    for _ in range(times):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        taken.append(start.elapsed_time(stop) / 1e3)
    return sorted(taken)[times // 2]


def measure() -> dict[str, float]:
    """Return the device's memory rate and matrix rate, in bytes and operations per second."""
    source = torch.randint(0, 127, (COPY_BYTES,), dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    copy_s = seconds(lambda: target.copy_(source))
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda").bfloat16() for _ in "ab")
    product_s = seconds(lambda: a @ b)
    return {
        "bytes_per_s": 2 * COPY_BYTES / copy_s,
        "flop_per_s": 2 * MATRIX_SIZE**3 / product_s,
    }


class Shape:
    """A decoder's sizes."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.layers = config["num_hidden_layers"]
        self.hidden = config["hidden_size"]
        self.heads = config["num_attention_heads"]
        kv_heads = config["num_key_value_heads"]
        head_dim = config.get("head_dim") or self.hidden // self.heads
        self.queries = self.heads * head_dim
        qkv = self.queries + 2 * kv_heads * head_dim
        mlp = 3 * config["intermediate_size"]
        if "num_experts" in config:
            # Count only the experts that one token uses.
            widths = config["num_experts_per_tok"] * config["moe_intermediate_size"]
            widths += config["shared_expert_intermediate_size"]
            mlp = 3 * widths + config["num_experts"]
        self.layer_weights = self.hidden * (qkv + self.queries + mlp)
        # The part of a layer after attention.
        self.finish_weights = self.hidden * (self.queries + mlp)
        self.head_weights = self.hidden * config["vocab_size"]
        self.kv_bytes = 2 * self.layers * 2 * kv_heads * head_dim

    def step_bytes(self, keys: float) -> float:
        """Return the bytes of bf16 weights and keys that a decode step of one sequence reads."""
        return 2 * (self.layers * self.layer_weights + self.head_weights) + keys * self.kv_bytes

    def prompt_flop(self, length: int) -> float:
        """Return the number of operations that a prompt needs.

        The head, and the part of the last layer after attention, are computed for the last token
        only.
        """
        products = 2 * self.layers * self.layer_weights * length + 2 * self.head_weights
        products -= 2 * self.finish_weights * (length - 1)
        # Attention has two products of queries and keys; half of the pairs are masked.
        return products + self.layers * 4 * self.queries * length * length / 2


def ratios(results: dict[str, Any], shape: Shape, most: dict[str, float]) -> dict[str, float]:
    """Return the rates of cases A and D, and their shares of the limits `most`."""
    found = {}
    cases, sizes = results["cases"], results["sizes"]
    if "A" in cases:
        keys = sizes["a_input"] + sizes["a_output"] / 2
        rate = shape.step_bytes(keys) / (cases["A"]["tpot_ms"] / 1e3)
        found |= {"decode_bytes_per_s": rate, "decode_share": rate / most["bytes_per_s"]}
    if "D" in cases:
        length = sizes["d_input"]
        rate = shape.prompt_flop(length) / length * cases["D"]["input_tok_per_s"]
        found |= {"prompt_flop_per_s": rate, "prompt_share": rate / most["flop_per_s"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results/h200"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    most = measure()
    report: dict[str, dict[str, float]] = {"device": most}
    for name, config in SHAPES.items():
        path = options.results / f"{name}.json"
        if path.exists():
            report[name] = ratios(json.loads(path.read_text()), Shape(config), most)
    for name, figures in report.items():
        print(name, *(f"{key} {value:.4g}" for key, value in figures.items()))
    if options.json:
        write_json(options.json, {"environment": describe_environment(), **report})


if __name__ == "__main__":
    main()
