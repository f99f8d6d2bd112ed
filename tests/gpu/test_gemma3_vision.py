"""Gemma 3 with its tower on a GPU: image tokens that attend forward, beside steps in graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import model_class, read_model_spec
from runtime.weights.fill import load_weights
from runtime.weights.load_model import dummy_tensors
from tests.support.engine import InProcessEngine
from tests.support.gpu import DEVICE, count_graphs, in_both_precisions, small_engine
from tests.support.tiny_gemma3_vision import PROMPTS, square, tiny_gemma3_vision
from tests.support.tiny_models import edit_json
from tests.support.tiny_vision import Prompt, picture, pixels, prompt_of

pytestmark = pytest.mark.also_cpu
NUM_NEW = 20


def generate(engine: InProcessEngine, prompt: Prompt) -> list[int]:
    number = max(engine.tokens, default=0) + 1
    engine.add(number, prompt.ids, NUM_NEW, ignore_eos=True, images=prompt.images)
    engine.run()
    return engine.tokens[number]


@in_both_precisions
@pytest.mark.parametrize("chunk", [20, 64])
def test_images_beside_text_in_graphs_equal_eager(
    chunk: int, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_engine(tiny_gemma3_vision(), disable_cuda_graph=True)
    expected = [generate(plain, prompt) for prompt in PROMPTS]
    engine = small_engine(tiny_gemma3_vision(), chunked_prefill_size=chunk)
    counts = count_graphs(engine, monkeypatch)
    for first, order in ((1, 1), (101, -1)):
        for number, prompt in list(enumerate(PROMPTS, first))[::order]:
            engine.add(number, prompt.ids, NUM_NEW, ignore_eos=True, images=prompt.images)
            # They join a batch that is running.
            engine.scheduler.step()
        engine.run()
        assert [engine.tokens[first + i] for i in range(len(PROMPTS))] == expected
    assert counts["decode"] >= NUM_NEW


@in_both_precisions
def test_a_question_behind_a_cached_image_has_a_graph(
    graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = square(1)
    question = prompt_of(14, image, 17, seed=3)
    expected = generate(small_engine(tiny_gemma3_vision(), disable_cuda_graph=True), question)
    engine = small_engine(tiny_gemma3_vision())
    generate(engine, prompt_of(14, image, 5, seed=3))
    counts = count_graphs(engine, monkeypatch)
    assert generate(engine, question) == expected
    assert engine.cached[2] >= 15 + image.num_tokens
    assert counts["prompt"] == 1
    assert engine.shared["images_computed_total"] == 1


def test_a_wide_tower_in_bfloat16_is_close_to_float32(tmp_path: Any) -> None:
    """Width and heads of the tower as it is published, of few blocks; heads of 72."""
    config = read_model_spec(tiny_gemma3_vision()).raw
    shape = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16}
    vision = {**config["vision_config"], **shape, "image_size": 56, "patch_size": 14}
    (tmp_path / "config.json").write_text("{}")
    edit_json(tmp_path / "config.json", **{**config, "vision_config": vision})
    edit_json(tmp_path / "config.json", mm_tokens_per_image=4)
    spec = read_model_spec(tmp_path)
    found = {}
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, DEVICE)):
        context = BuildContext(dtype=dtype, device=torch.device(device))
        model: Any = model_class(spec)(spec, context)
        weights = dummy_tensors(spec, 0, torch.device("cpu"))
        load_weights(model, ((key, tensor.to(device)) for key, tensor in weights))
        images = [pixels(picture(2, 2, seed, 28)).to(device) for seed in (1, 2)]
        with torch.inference_mode():
            found[device, dtype] = model.visual.see(images)
    truth, rounded = found.values()
    for wanted, ours in zip(truth, rounded, strict=True):
        assert ours.dtype is torch.bfloat16
        error = (ours.float().cpu() - wanted).norm() / wanted.norm()
        assert float(error) < 0.02
