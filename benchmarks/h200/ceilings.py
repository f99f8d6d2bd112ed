"""Measures the limits of the GPU, and how close a decode step and a prompt come to these limits.

    python -m benchmarks.h200.ceilings [--results benchmarks/results/h200] [--json FILE]

A large copy gives the rate of the memory (bytes read plus bytes written). A large bf16 product
gives the rate of the matrix units. The results of `benchmarks.h200.run` are read from the file of
each shape, such as `8b.json`. Their case A shows how fast a decode step reads its weights and keys;
their case D shows how fast prompts are computed. The floors are what cases A to D would report if
all work ran at these two rates.
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
        width = 3 * config["intermediate_size"]
        self.experts = config.get("num_experts") or config.get("num_local_experts") or 0
        self.chosen = config.get("num_experts_per_tok", 0)
        # Weights of one expert.
        self.expert_weights = 0
        if self.experts:
            self.expert_weights = (
                3 * self.hidden * config.get("moe_intermediate_size", config["intermediate_size"])
            )
            width = 3 * config.get("shared_expert_intermediate_size", 0) + self.experts
        is_mxfp4 = config.get("quantization_config", {}).get("quant_method") == "mxfp4"
        # In MXFP4, 32 codes of 4 bits share a scale of 8 bits.
        self.expert_bytes = self.expert_weights * (17 / 32 if is_mxfp4 else 2)
        # Weights of a layer that every token uses.
        self.plain_weights = self.hidden * (qkv + self.queries + width)
        # Weights of a layer that one token uses.
        self.layer_weights = self.plain_weights + self.chosen * self.expert_weights
        # The part of a layer after attention.
        self.finish_weights = self.layer_weights - self.hidden * qkv
        self.head_weights = self.hidden * config["vocab_size"]
        # Bytes of one layer's keys and values for one token.
        self.kv_bytes = 2 * 2 * kv_heads * head_dim
        # In gpt-oss, every second layer has a window.
        self.window = config.get("sliding_window") or 0
        self.windowed = self.layers // 2 if self.window else 0

    def layers_keys(self, keys: float) -> float:
        """Return the number of keys that one query reads in all layers together."""
        return (self.layers - self.windowed) * keys + self.windowed * min(keys, self.window)

    def step_bytes(self, keys: float, rows: int = 1) -> float:
        """Return the bytes of weights and keys that a decode step reads.

        Args:
            keys: number of keys of each sequence.
            rows: number of sequences. Each chooses its experts at random, independently of the
                others, so the number of distinct experts is an expected value.
        """
        weights = 2.0 * (self.layers * self.plain_weights + self.head_weights)
        if self.experts:
            distinct = self.experts * (1 - (1 - self.chosen / self.experts) ** rows)
            weights += self.layers * distinct * self.expert_bytes
        return weights + rows * self.layers_keys(keys) * self.kv_bytes

    def step_flop(self, keys: float, rows: int) -> float:
        """Return the number of operations of a decode step."""
        products = 2 * (self.layers * self.layer_weights + self.head_weights)
        return rows * (products + 4 * self.queries * self.layers_keys(keys))

    def prompt_flop(self, length: int) -> float:
        """Return the number of operations that a prompt needs.

        The head, and the part of the last layer after attention, are computed for the last token
        only.
        """
        products = 2 * self.layers * self.layer_weights * length + 2 * self.head_weights
        products -= 2 * self.finish_weights * (length - 1)
        # Attention has two products of queries and keys; half of the pairs are masked.
        pairs = (self.layers - self.windowed) * length * length / 2
        inside = min(length, self.window)
        pairs += self.windowed * (length * inside - inside * inside / 2)
        return products + 4 * self.queries * pairs

    def step_s(self, keys: float, rows: int, most: dict[str, float]) -> float:
        """Return the seconds of a decode step at the limits `most`."""
        moved = self.step_bytes(keys, rows) / most["bytes_per_s"]
        return max(moved, self.step_flop(keys, rows) / most["flop_per_s"])


def floors(sizes: dict[str, Any], shape: Shape, most: dict[str, float]) -> dict[str, float]:
    """Return what cases A to D would report if all work ran at the limits `most`.

    Prompts run at the matrix rate. A decode step takes the longer of its bytes at the memory's rate
    and its operations at the matrix rate. Its sequences have the mean number of keys.
    """
    prompt, output = sizes["a_input"], sizes["a_output"]
    found = {"a_tpot_ms": 1e3 * shape.step_s(prompt + output / 2, 1, most)}
    cases = {
        "b": (sizes["b_requests"], prompt, output),
        "c": (sizes["c_requests"], sizes["c_input"], sizes["c_output"]),
    }
    for name, (rows, length, new) in cases.items():
        # A prompt gives the first token.
        prompts_s = rows * shape.prompt_flop(length) / most["flop_per_s"]
        total_s = prompts_s + (new - 1) * shape.step_s(length + new / 2, rows, most)
        found[f"{name}_output_tok_per_s"] = rows * new / total_s
    length = sizes["d_input"]
    found["d_input_tok_per_s"] = length * most["flop_per_s"] / shape.prompt_flop(length)
    return found


def ratios(results: dict[str, Any], shape: Shape, most: dict[str, float]) -> dict[str, float]:
    """Return the rates of cases A and D, their shares of the limits `most`, and the floors."""
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
    return found | {f"floor_{name}": each for name, each in floors(sizes, shape, most).items()}


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
