"""The whole worker with models of `transformers`: what the scheduler does changes no token."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cpu.library import unavailable
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.weight_messages import LoadFolder
from runtime.requests.sampling_params import GrammarSpec
from tests.support.adapted_models import adapted_model
from tests.support.engine import DEVICE, InProcessEngine
from tests.support.graphs import record_graphs_on_the_cpu
from tests.support.tiny_models import VOCAB_SIZE, changed_weights

# All layers in one stream; each layer's own code, with scaled logits; caps and windows; learned
# positions; experts.
NAMES = ["olmo2", "granite", "gemma2", "gpt2", "glm4_moe"]
# Some have families by now.
ADAPTER = {"model_impl": "transformers"}
NUM_NEW = 12
PROMPTS = [[(7 * i + 3 * j) % VOCAB_SIZE for j in range(5 + 11 * i)] for i in range(6)]


def run(folder: Path, **options: Any) -> InProcessEngine:
    engine = InProcessEngine(folder, model_overrides=ADAPTER, **options)
    for number, prompt in enumerate(PROMPTS, start=1):
        engine.add(number, prompt, NUM_NEW, ignore_eos=True)
    engine.run()
    return engine


@cache
def expected(folder: Path) -> dict[int, list[int]]:
    """What `transformers` generates."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = {}
    for number, prompt in enumerate(PROMPTS, start=1):
        tokens = list(prompt)
        for _ in range(NUM_NEW):
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        found[number] = tokens[len(prompt) :]
    return found


WAYS: dict[str, dict[str, Any]] = {
    "chunked and overlap": {"overlap": True, "chunked_prefill_size": 7},
    "retracted": {"max_total_tokens": 192, "page_size": 8},
}


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", NAMES)
def test_scheduling_does_not_change_the_output(name: str, way: str) -> None:
    engine = run(adapted_model(name), **WAYS[way])
    assert engine.tokens == expected(adapted_model(name))
    if way == "retracted":
        assert engine.shared["num_retractions_total"] > 0
    if DEVICE == "cpu" and unavailable() is None:
        # Decode steps are recorded and repeated, as those of our own families.
        assert bool(engine.runner.steps.num_repeats) == (name != "glm4_moe")


@pytest.mark.skipif(DEVICE != "cpu", reason="the engines of the test above have real graphs")
# The experts of a CPU read the router's choices on the host.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "glm4_moe"])
def test_graphs_change_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs repeat what they recorded: nothing of a step may be left on the host."""
    record_graphs_on_the_cpu(monkeypatch)
    engine = run(adapted_model(name), max_running_requests=8)
    assert engine.runner.has_graphs
    assert engine.tokens == expected(adapted_model(name))


def test_extras_grammars_and_new_weights(tmp_path: Path) -> None:
    folder = adapted_model("phi3")
    engine = InProcessEngine(folder, model_overrides=ADAPTER)
    engine.add(1, PROMPTS[2], NUM_NEW, LogprobSpec(start_len=0, top_num=2), ignore_eos=True)
    engine.run()
    assert engine.tokens[1] == expected(folder)[3]
    # Of the first token there is none.
    assert len(engine.inputs[1]) == len(PROMPTS[2]) - 1
    # The most likely token is the one that was taken.
    for token, position in zip(engine.tokens[1], engine.outputs[1], strict=True):
        assert position.top[0][1] == token

    spec = GrammarSpec("regex", "[ab]{6}")
    engine.add(2, PROMPTS[1], NUM_NEW, grammar=spec)
    engine.run()
    assert len(engine.tokens[2]) <= 7

    other = changed_weights(folder, tmp_path / "other")
    reply = engine.ask(LoadFolder(str(other)), flush_cache=True)
    assert reply.success, reply
    assert engine.generate(PROMPTS[2], NUM_NEW, ignore_eos=True) == expected(other)[3]


@pytest.mark.slow
def test_two_rank_processes() -> None:
    folder = adapted_model("glm4_moe")
    assert run(folder, tp_size=2).tokens == expected(folder)
