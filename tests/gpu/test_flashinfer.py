"""The FlashInfer back end beside the Triton one: the same tokens, but for ties of their dtype."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.messages import LogprobSpec
from tests.gpu.test_precision import SHAPES, SIZES
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import write_tokenizer

# What the log-probabilities of two ways of computing differ by, in a model of this size.
ROUNDING = {"bfloat16": 0.15, "float16": 0.04}


@pytest.mark.timeout(600)  # Its kernels are compiled when first used.
# Without graphs it attends for decoding rows too: in bf16 ties would part most requests soon.
@pytest.mark.parametrize(("dtype", "graphs"), [("bfloat16", True), ("float16", False)])
def test_tokens_equal_those_of_triton(tmp_path: Path, dtype: str, graphs: bool) -> None:
    pytest.importorskip("flashinfer")
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **SHAPES["LlamaForCausalLM"])
    transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 4000, n).tolist() for n in (5, 40, 300, 301, 700, 900)]
    engines = {
        backend: InProcessEngine(
            tmp_path,
            device="cuda",
            dtype=dtype,
            context_len=1024,
            max_total_tokens=8192,
            # Prompts are cut: later chunks have a prefix, and decoding rows beside them.
            chunked_prefill_size=256,
            attention_backend=backend,
            disable_cuda_graph=not graphs,
            overlap=True,
        )
        for backend in ("triton", "flashinfer")
    }
    for engine in engines.values():
        for i, prompt in enumerate(prompts, 1):
            engine.add(i, prompt, 40, LogprobSpec(-1, 2), ignore_eos=True)
        engine.run()
    compared = 0
    for i in range(1, len(prompts) + 1):
        ours, theirs = (engine.tokens[i] for engine in engines.values())
        pairs = enumerate(zip(ours, theirs, strict=True))
        first = next((n for n, (a, b) in pairs if a != b), len(ours))
        compared += first
        tops = [[each.top for each in engine.outputs[i]] for engine in engines.values()]
        for n in range(first):
            assert abs(tops[0][n][0][0] - tops[1][n][0][0]) < ROUNDING[dtype]
        if first < len(ours):
            (best, _), (second, _) = tops[0][first]
            assert best - second < ROUNDING[dtype], f"request {i} parts at {first}: {best} {second}"
    assert compared >= 20 * len(prompts)
