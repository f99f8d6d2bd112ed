"""Every family of ours, and models through the adapter, in bf16 beside `transformers` in float32.

The reference has the same weights, rounded to bf16. `transformers` in bf16 shows how large errors
of rounding are: experts that nearly tie are chosen differently, in its code and in ours. Greedy
tokens are compared with ties in mind: a token that the reference does not choose must be nearly as
likely as the one that it chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from runtime.extras.logprobs.positions import LogprobSpec
from tests.support.adapted_models import ADAPTED_MODELS, adapted_model
from tests.support.engine import InProcessEngine
from tests.support.gpu import DEVICE
from tests.support.tiny_families import TINY_FAMILIES, tiny_family
from tests.support.tiny_models import VOCAB_SIZE, tiny_model

# Families whose variants are in `tiny_models`.
OTHERS = ("gemma3", "mixtral", "qwen2_moe", "qwen3", "qwen3_moe")
CASES = [
    *((name, "headrace") for name in (*TINY_FAMILIES, *OTHERS)),
    *((name, "transformers") for name in ADAPTED_MODELS),
]
LENGTHS = (1, 61, 2, 33, 40, 7, 24, 25, 16, 17, 50, 3, 12, 29, 45, 8)
PROMPTS = [
    np.random.default_rng(i).integers(3, VOCAB_SIZE, length).tolist()
    for i, length in enumerate(LENGTHS)
]
NUM_NEW = 8
# Ids whose log-probabilities are compared.
IDS = list(range(0, VOCAB_SIZE, 5))
OPTIONS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "bfloat16",
    "overlap": True,
    "max_running_requests": 16,
}
# Mean difference of log-probabilities, relative to that of `transformers` in bf16. A few experts
# that nearly tie change it.
MOST_ERROR = 1.5
# In the same unit, by how much a token may be less likely than the reference's.
TIE = 8.0
# Share of tokens that may be less likely than that, where experts tie.
MOST_APART = 0.03


def folder_of(name: str) -> Path:
    if name in TINY_FAMILIES:
        return tiny_family(name)
    return adapted_model(name) if name in ADAPTED_MODELS else tiny_model(name)


def has_stacked_experts(folder: Path) -> bool:
    """Whether the file has one tensor for all experts of a layer, which the adapter refuses."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return any(key.endswith("experts.down_proj") for key in file.keys())  # noqa: SIM118


@cache
def references(name: str, impl: str) -> tuple[Any, Any]:
    """The model of `transformers` in float32, with weights of bf16, and in bf16."""
    import transformers

    variant = TINY_FAMILIES.get(name) if impl == "headrace" else None
    kind = (
        transformers.AutoModelForCausalLM
        if variant is None
        else getattr(transformers, variant.architecture)
    )
    config = transformers.AutoConfig.from_pretrained(folder_of(name))
    if hasattr(config, "rotary_dim") and config.rope_parameters is not None:
        # transformers 5.17 does not read the key.
        config.rope_parameters["partial_rotary_factor"] = config.rotary_dim / config.head_dim
    # In transformers 5.17, the other implementations of attention omit Gemma 2's soft cap.
    options = {"config": config, "attn_implementation": "eager"}
    exact, rounded = (
        kind.from_pretrained(folder_of(name), dtype=dtype, **options).eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
    return exact, rounded


@cache
def expected(name: str, impl: str, tokens: tuple[int, ...]) -> list[Tensor]:
    """Return what both references expect after each token, as log-probabilities."""
    with torch.inference_mode():
        given = torch.tensor([tokens])
        found = [model(given, use_cache=False).logits[0] for model in references(name, impl)]
    return [torch.log_softmax(logits.float(), -1) for logits in found]


def run(
    engine: InProcessEngine, prompts: Iterable[int], start: int, *, together: bool = True
) -> list[tuple[list[int], Tensor]]:
    """Run prompts; return each one's tokens, and the log-probabilities of `IDS` after them.

    `start` is the first position of a prompt that is reported, or -1.
    """
    first, answers = max(engine.tokens, default=0) + 1, []
    chosen = list(prompts)
    for i, index in enumerate(chosen):
        engine.add(first + i, PROMPTS[index], NUM_NEW, LogprobSpec(start, 0, IDS), ignore_eos=True)
        if not together:
            engine.run()
    engine.run()
    for i, index in enumerate(chosen):
        found = [*engine.inputs[first + i], *engine.outputs[first + i]]
        values = torch.tensor([each.id_values for each in found])
        answers.append((PROMPTS[index] + engine.tokens[first + i], values))
    return answers


class Errors:
    """How far answers are from the reference.

    Attributes:
        mine: mean difference of log-probabilities from the reference.
        theirs: the same of `transformers` in bf16, at the same positions.
        leads: by how much the reference prefers its own choice to each generated token.
    """

    def __init__(self, name: str, impl: str, answers: list[tuple[list[int], Tensor]]) -> None:
        mine, theirs, leads = [], [], []
        for tokens, values in answers:
            want, near = expected(name, impl, tuple(tokens[:-1]))
            places = slice(len(want) - len(values), None)
            mine.append((values - want[places, IDS]).abs().mean(-1))
            theirs.append((near - want)[places, IDS].abs().mean(-1))
            after = want[-NUM_NEW:]
            taken = after.gather(1, torch.tensor(tokens[-NUM_NEW:])[:, None])[:, 0]
            leads.append(after.amax(-1) - taken)
        self.mine, self.theirs = (float(torch.cat(each).mean()) for each in (mine, theirs))
        self.leads = torch.cat(leads)


@pytest.mark.also_cpu(asked=True)
@pytest.mark.parametrize(("name", "impl"), CASES)
def test_bf16_is_as_near_to_float32_as_transformers(
    name: str, impl: str, record_property: Any
) -> None:
    torch.set_num_threads(1)
    if impl == "transformers" and has_stacked_experts(folder_of(name)):
        pytest.skip("this version of transformers stores all experts as one tensor")
    options = OPTIONS | {"model_overrides": {"model_impl": impl}}
    engine = InProcessEngine(folder_of(name), **options)
    chunked = InProcessEngine(
        folder_of(name), **options, chunked_prefill_size=7, disable_cuda_graph=True
    )
    everything = range(len(PROMPTS))
    ways = {
        "batch": run(engine, everything, 0),
        "cached": run(engine, everything, -1),
        "alone": run(engine, everything, 0, together=False),
        "chunked": run(chunked, everything, 0),
    }
    assert engine.cached[1 + len(PROMPTS) + 1] >= 48
    errors = {way: Errors(name, impl, found) for way, found in ways.items()}
    ratios = {way: round(each.mine / each.theirs, 3) for way, each in errors.items()}
    unit = errors["batch"].theirs
    leads = torch.cat([each.leads for each in errors.values()]) / unit
    apart, largest = float((leads > TIE).float().mean()), float(leads.max())
    record_property("found", f"{name} {impl} {unit:.4f} {ratios} {apart:.4f} {largest:.1f}")
    assert max(ratios.values()) <= MOST_ERROR, ratios
    assert apart <= MOST_APART, (apart, largest)
