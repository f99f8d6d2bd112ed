"""The last layer computes its part after attention only for tokens whose output is read."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
from torch import Tensor

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.models.attention.forward_batch import ForwardBatch
from runtime.models.decoder.model import DecoderAttention, DecoderLayer, DecoderMLP
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

PROMPT = np.random.default_rng(0).integers(3, 500, 40).tolist()
OTHER = np.random.default_rng(1).integers(3, 500, 24).tolist()
# A graph does not call the layers.
EAGER = {"disable_cuda_graph": True}
# Prompts in steps of 16 tokens, so that a step's chunks may want no token at all.
CHUNKS = {"chunked_prefill_size": 16, "disable_radix_cache": True}


class WatchedBlock:
    """A layer in whose second half tokens are counted, a number a step."""

    def __init__(self, layer: DecoderLayer) -> None:
        self.layer = layer
        self.num_tokens: list[int] = []

    def attend(self, hidden: Tensor | None, residual: Tensor, batch: ForwardBatch) -> Tensor:
        return self.layer.attend(hidden, residual, batch)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        self.num_tokens.append(len(attended))
        return self.layer.finish(attended, residual)


class Rows:
    """How many tokens each step computed in its first and last layer's second half."""

    def __init__(self, engine: InProcessEngine) -> None:
        layers = engine.model.model.layers
        first, last = WatchedBlock(layers[0]), WatchedBlock(layers[-1])
        layers[0], layers[-1] = first, last
        self.of_first, self.of_last = first.num_tokens, last.num_tokens


def test_a_prompt_has_one_token_in_the_last_layer() -> None:
    engine = InProcessEngine(tiny_model("llama"), **EAGER)
    rows = Rows(engine)
    engine.add(1, PROMPT, 3, ignore_eos=True)
    engine.add(2, OTHER, 3, ignore_eos=True)
    engine.run()
    assert rows.of_first == [64, 2, 2]
    assert rows.of_last == [2, 2, 2]


def test_a_chunk_without_a_new_token_has_none() -> None:
    engine = InProcessEngine(tiny_model("llama"), **EAGER, **CHUNKS)
    rows = Rows(engine)
    engine.add(1, PROMPT, 2, ignore_eos=True)
    engine.run()
    assert rows.of_first == [16, 16, 8, 1]
    assert rows.of_last == [1, 1]


def test_what_prompts_report_is_computed_for_all_their_tokens() -> None:
    engine = InProcessEngine(tiny_model("llama"), enable_return_hidden_states=True, **EAGER)
    rows = Rows(engine)
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
    spec: LogprobSpec | None,
) -> None:
    engine = InProcessEngine(tiny_model("llama"), **EAGER)
    given: list[weakref.ref[Tensor]] = []

    class NotedAttention:
        def __init__(self, attention: DecoderAttention) -> None:
            self.o_proj, self.attend_as_before = attention.o_proj, attention.attend
            self.rounding = attention.rounding

        def attend(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
            attended = self.attend_as_before(hidden, batch)
            given.append(weakref.ref(attended))
            return attended

    class LookingMLP:
        def __init__(self, mlp: DecoderMLP) -> None:
            self.forward_as_before, self.rounding = mlp.forward, mlp.rounding

        def forward(self, hidden: Tensor) -> Tensor:
            assert given[-1]() is None
            return self.forward_as_before(hidden)

    for layer in engine.model.model.layers:
        layer.self_attn, layer.mlp = NotedAttention(layer.self_attn), LookingMLP(layer.mlp)
    engine.add(1, PROMPT, 2, spec, ignore_eos=True)
    engine.run()
    assert given
    assert engine.reasons[1].type == "length"
