"""Of the last layer, what lies behind attention is computed for tokens whose output is read."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.models.decoder.model import DecoderLayer, DecoderMLP
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

PROMPT = np.random.default_rng(0).integers(3, 500, 40).tolist()
OTHER = np.random.default_rng(1).integers(3, 500, 24).tolist()
# A graph does not call the layers.
EAGER = {"disable_cuda_graph": True}
# Prompts in steps of 16 tokens, so that a step's chunks may want no token at all.
CHUNKS = {"chunked_prefill_size": 16, "disable_radix_cache": True}


class Rows:
    """How many tokens each step computed in its first and last layer's second half."""

    def __init__(self, patch: pytest.MonkeyPatch, engine: InProcessEngine) -> None:
        layers = engine.model.model.layers
        self.of_first: list[int] = []
        self.of_last: list[int] = []
        finish = DecoderLayer.finish

        def recorded(layer: DecoderLayer, attended: Tensor, residual: Tensor) -> Tensor:
            if layer is layers[0]:
                self.of_first.append(len(attended))
            if layer is layers[-1]:
                self.of_last.append(len(attended))
            return finish(layer, attended, residual)

        patch.setattr(DecoderLayer, "finish", recorded)


def test_a_prompt_has_one_token_in_the_last_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InProcessEngine(tiny_model("llama"), **EAGER)
    rows = Rows(monkeypatch, engine)
    engine.add(1, PROMPT, 3, ignore_eos=True)
    engine.add(2, OTHER, 3, ignore_eos=True)
    engine.run()
    assert rows.of_first == [64, 2, 2]
    assert rows.of_last == [2, 2, 2]


def test_a_chunk_without_a_new_token_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InProcessEngine(tiny_model("llama"), **EAGER, **CHUNKS)
    rows = Rows(monkeypatch, engine)
    engine.add(1, PROMPT, 2, ignore_eos=True)
    engine.run()
    assert rows.of_first == [16, 16, 8, 1]
    assert rows.of_last == [1, 1]


def test_what_prompts_report_is_computed_for_all_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = InProcessEngine(tiny_model("llama"), enable_return_hidden_states=True, **EAGER)
    rows = Rows(monkeypatch, engine)
    engine.add(1, PROMPT, 1, LogprobSpec(0, 2), ignore_eos=True)
    engine.run()
    engine.add(2, OTHER, 1, hidden_states="all", ignore_eos=True)
    engine.run()
    assert rows.of_last == rows.of_first == [40, 24]


@pytest.mark.parametrize("options", [{}, CHUNKS], ids=["whole", "chunks"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_outputs_are_those_of_a_prompt_computed_whole(name: str, options: dict[str, int]) -> None:
    """A request that reports its prompt keeps every token of its step, the others' too."""
    alone = InProcessEngine(tiny_model(name), **options)
    beside = InProcessEngine(tiny_model(name), **options)
    for engine in (alone, beside):
        engine.add(1, PROMPT, 8, LogprobSpec(-1, 2), ignore_eos=True)
    beside.add(2, OTHER, 8, LogprobSpec(0, 2), ignore_eos=True)
    for engine in (alone, beside):
        engine.run()
    assert alone.tokens[1] == beside.tokens[1]
    found, wanted = (
        [position.logprob for position in engine.outputs[1]] for engine in (alone, beside)
    )
    assert found == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("spec", [None, LogprobSpec(0, 2)], ids=["one token", "all tokens"])
def test_what_attention_gave_is_gone_when_the_next_block_needs_memory(
    monkeypatch: pytest.MonkeyPatch, spec: LogprobSpec | None
) -> None:
    engine = InProcessEngine(tiny_model("llama"), **EAGER)
    attend, forward = DecoderLayer.attend, DecoderMLP.forward
    given: list[weakref.ref[Tensor]] = []

    def attend_and_note(layer: DecoderLayer, *arguments: Any) -> Tensor:
        attended = attend(layer, *arguments)
        given.append(weakref.ref(attended))
        return attended

    def forward_and_look(mlp: DecoderMLP, hidden: Tensor) -> Tensor:
        assert given[-1]() is None
        return forward(mlp, hidden)

    monkeypatch.setattr(DecoderLayer, "attend", attend_and_note)
    monkeypatch.setattr(DecoderMLP, "forward", forward_and_look)
    engine.add(1, PROMPT, 2, spec, ignore_eos=True)
    engine.run()
    assert given
    assert engine.reasons[1].type == "length"
