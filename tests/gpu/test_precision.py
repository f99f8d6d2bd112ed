"""bf16 on the GPU beside float32: as near as `transformers` in bf16 is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.messages import LogprobSpec
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "max_position_embeddings": 2048,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 2},
    "Qwen2ForCausalLM": {"num_attention_heads": 16, "num_key_value_heads": 2},
    "Qwen3ForCausalLM": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128},
}


@pytest.mark.parametrize("architecture", SHAPES)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_as_near_to_float32_as_transformers(
    architecture: str, backend: str, tmp_path: Path
) -> None:
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**SIZES, **SHAPES[architecture]))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    prompts = [
        np.random.default_rng(i).integers(3, 4000, n).tolist() for i, n in enumerate((9, 200, 900))
    ]
    asked = list(range(0, 4096, 41))
    engine = InProcessEngine(
        tmp_path,
        device="cuda",
        dtype="bfloat16",
        context_len=1024,
        max_total_tokens=8192,
        chunked_prefill_size=4096,
        attention_backend=backend,
        overlap=True,
    )
    for i, prompt in enumerate(prompts):
        engine.add(i + 1, prompt, 8, LogprobSpec(0, 0, asked), ignore_eos=True)
    engine.run()
    theirs = model.cuda().eval()
    exact = model_class.from_pretrained(tmp_path, dtype=torch.float32).cuda().eval()
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *engine.tokens[i + 1]]], device="cuda")
        with torch.no_grad():
            want = torch.log_softmax(exact(ids).logits[0, :-1].double(), -1)[:, asked]
            near = torch.log_softmax(theirs(ids).logits[0, :-1].double(), -1)[:, asked]
        found = [*engine.inputs[i + 1], *engine.outputs[i + 1]]
        mine = torch.tensor([each.id_values for each in found], dtype=torch.float64, device="cuda")
        assert mine.shape == want.shape
        ours, usual = (mine - want).norm(), (near - want).norm()
        print(f"{architecture} {backend} {len(prompt)}: ours {ours:.4f}, transformers {usual:.4f}")
        assert ours <= 1.25 * usual
