"""Checks bfloat16 on a GPU: errors relative to float32, and equal tokens with CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from runtime.extras.logprobs.positions import LogprobSpec
from tests.support.engine import InProcessEngine
from tests.support.ties import assert_same_but_for_ties
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
WAYS: dict[str, dict[str, Any]] = {
    "eager, plain": {"disable_cuda_graph": True, "overlap": False},
    "eager, overlapped": {"disable_cuda_graph": True, "overlap": True},
    "graphs, plain": {"disable_cuda_graph": False, "overlap": False},
    "graphs, overlapped": {"disable_cuda_graph": False, "overlap": True},
}
# Number of tokens generated for each prompt, to measure the errors of decode steps. With fewer
# tokens, the error is mostly noise.
NUM_DECODED = 64
PROMPT_LENGTHS = (5, 40, 300, 301, 700, 900)
OPTIONS: dict[str, Any] = {"context_len": 1024, "max_total_tokens": 8192}


def write_model(architecture: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Write a random model with a tokenizer; return its class in `transformers`."""
    import transformers

    torch.manual_seed(0)
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**SIZES, **SHAPES[architecture])).to(dtype)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return model_class


def errors(
    architecture: str, backend: str, folder: Path, device: str = "cuda"
) -> Iterator[dict[str, Any]]:
    """Yield the errors of log-probabilities relative to float32, for prompts of three lengths.

    An error is the norm of the differences for a hundred token ids at every position. The errors of
    this engine and of `transformers` are measured, for prompt positions and for decode steps.
    """
    model_class = write_model(architecture, folder)
    # The float32 model is loaded again. Casting it would also round the RoPE frequencies.
    theirs = model_class.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    prompts = [
        np.random.default_rng(i).integers(3, 4000, n).tolist() for i, n in enumerate((9, 200, 900))
    ]
    asked = list(range(0, 4096, 41))
    engine = InProcessEngine(
        folder,
        device=device,
        dtype="bfloat16",
        chunked_prefill_size=4096,
        attention_backend=backend,
        overlap=True,
        **OPTIONS,
    )
    for i, prompt in enumerate(prompts):
        engine.add(i + 1, prompt, NUM_DECODED, LogprobSpec(0, 0, asked), ignore_eos=True)
    engine.run()
    exact = model_class.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([[*prompt, *engine.tokens[i + 1]]], device=device)
        with torch.no_grad():
            want = torch.log_softmax(exact(ids).logits[0, :-1].double(), -1)[:, asked]
            near = torch.log_softmax(theirs(ids).logits[0, :-1].double(), -1)[:, asked]
        found = [*engine.inputs[i + 1], *engine.outputs[i + 1]]
        mine = torch.tensor([each.id_values for each in found], dtype=torch.float64, device=device)
        assert mine.shape == want.shape
        num_inputs = len(engine.inputs[i + 1])
        for part, places in (
            ("prompt", slice(0, num_inputs)),
            ("output", slice(num_inputs, None)),
        ):
            yield {
                "model": architecture,
                "attention": backend,
                "prompt": len(prompt),
                "part": part,
                "ours": float((mine - want)[places].norm()),
                "transformers": float((near - want)[places].norm()),
            }


def same_tokens(
    architecture: str,
    folder: Path,
    ways: dict[str, dict[str, Any]],
    dtype: str = "bfloat16",
    device: str = "cuda",
    lengths: Sequence[int] = PROMPT_LENGTHS,
    num_new: int = 40,
) -> dict[str, int]:
    """Compare the greedy tokens of several engine configurations with those of the first one.

    Args:
        architecture: one of `SHAPES`.
        folder: the folder to which the model is written.
        ways: options of each engine, by name.
        dtype: data type of the weights and of the computation.
        device: the device that computes.
        lengths: lengths of the prompts.
        num_new: number of output tokens. Short outputs mostly end before tokens tie.

    Returns:
        For each configuration except the first, the number of requests whose tokens are all equal.

    Raises:
        AssertionError: tokens differ at a position where the first configuration's token leads by
            more than rounding in this data type explains.
    """
    write_model(architecture, folder, getattr(torch, dtype))
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 4000, length).tolist() for length in lengths]
    numbers = range(1, len(prompts) + 1)
    engines: dict[str, InProcessEngine] = {}
    for way, options in ways.items():
        # Prompts are split, so that later chunks have a prefix and run beside decoding rows.
        engine = engines[way] = InProcessEngine(
            folder, device=device, dtype=dtype, chunked_prefill_size=256, **OPTIONS, **options
        )
        for i, prompt in zip(numbers, prompts, strict=True):
            engine.add(i, prompt, num_new, LogprobSpec(-1, 2), ignore_eos=True)
        engine.run()
    first, *others = ways
    return {
        way: assert_same_but_for_ties(engines[first], engines[way], numbers, dtype)
        for way in others
    }
