"""Measures what rounding to E4M3 costs in each kind of matrix of a real model, on a CPU.

    python -m benchmarks.fp8_parts [smollm2] [--tokens 1024]

`transformers` computes in float32 with weights, inputs of products, or both rounded as
`--quantization fp8` rounds them, in all layers or in one kind of matrix. Each line has the mean
divergence (KL) from the logits without rounding. It varies less with the text than the perplexity,
which is also printed. The text is that of `benchmarks.fp8_accuracy`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gguf_accuracy import negative_log_likelihood, windows
from kernels.fp8_linear import Blocks, encode
from kernels.rounding import Rounding, round_activations
from runtime.models.quantization.fp8.parameters import NUM_SCALES
from runtime.text.tokenizer import Tokenizer
from tests.real.test_gguf_files import reference
from tools.real_models import path_of

ALL = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj"
# Name, matrices, scales that are tried for each row of a weight (0: it is kept), and whether inputs
# are rounded.
CASES = (
    ("weights, one scale", ALL, 1, False),
    ("weights, the best of 8 scales", ALL, NUM_SCALES, False),
    ("inputs", ALL, 0, True),
    ("both, one scale", ALL, 1, True),
    ("both", ALL, NUM_SCALES, True),
    *((f"both, {kinds}", kinds, NUM_SCALES, True)
      for kinds in ("q_proj k_proj v_proj", "o_proj", "gate_proj up_proj", "down_proj")),
)  # fmt: skip


@contextmanager
def rounded(model: nn.Module, kinds: str, num_scales: int, inputs: bool) -> Iterator[None]:
    """Round matrices of some kinds, and undo it at the end; see `CASES`."""
    kept: list[tuple[nn.Linear, Tensor]] = []
    hooks = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or name.rpartition(".")[2] not in kinds.split():
            continue
        kept.append((module, module.weight.data))
        if num_scales:
            codes, scales = encode(module.weight.data, Blocks(1, 0), num_scales=num_scales)
            module.weight.data = codes.float() * scales
        if inputs:
            hooks.append(module.register_forward_pre_hook(_round_input))
    try:
        yield
    finally:
        for module, weight in kept:
            module.weight.data = weight
        for hook in hooks:
            hook.remove()


def _round_input(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
    return (round_activations(given[0].flatten(0, -2), Rounding()).view(given[0].shape),)


@torch.inference_mode()
def log_probabilities(model: Any, texts: list[list[int]]) -> list[Tensor]:
    """Return each text's logarithms of probabilities, `[length, vocab_size]`."""
    logits = (model(torch.tensor([ids]), use_cache=False).logits[0] for ids in texts)
    return [each.log_softmax(-1) for each in logits]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1024)
    options = parser.parse_args()
    texts = windows(Tokenizer.from_folder(path_of(options.model)), options.tokens)
    model = reference(options.model).to(torch.bfloat16).float()
    exact = log_probabilities(model, texts)
    for name, *case in (("nothing", "", 0, False), *CASES):
        with rounded(model, *case):
            found = log_probabilities(model, texts)
        divergence = sum(
            float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(exact, found, strict=True)
        ) / len(texts)
        total = sum(map(negative_log_likelihood, found, texts))
        perplexity = math.exp(total / sum(len(ids) - 1 for ids in texts))
        print(f"{name:32} divergence {divergence:.5f}, perplexity {perplexity:.3f}", flush=True)


if __name__ == "__main__":
    main()
