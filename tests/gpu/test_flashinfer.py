"""The FlashInfer back end beside the Triton one: the same tokens, but for ties of bf16."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from runtime.messages import LogprobSpec
from tests.gpu.test_precision import SHAPES, SIZES
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import write_tokenizer

# The rounding of a bf16 logit of this size of model.
TIE = 0.1


@pytest.mark.timeout(600)  # Its kernels are compiled when first used.
@pytest.mark.parametrize("graphs", [True, False])
def test_tokens_equal_those_of_triton(tmp_path: Path, graphs: bool) -> None:
    """Without graphs it attends for decoding rows too."""
    pytest.importorskip("flashinfer")
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **SHAPES["LlamaForCausalLM"])
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 4000, n).tolist() for n in (5, 40, 300, 301, 700, 900)]
    engines = {
        backend: InProcessEngine(
            tmp_path,
            device="cuda",
            dtype="bfloat16",
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
    equal = 0
    for i in range(1, len(prompts) + 1):
        ours, theirs = (engine.tokens[i] for engine in engines.values())
        first = next((n for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        equal += first is None
        if first is not None:
            (best, _), (second, _) = engines["triton"].outputs[i][first].top
            assert best - second < TIE, f"request {i} parts at token {first}: {best} {second}"
    assert equal >= len(prompts) // 2
