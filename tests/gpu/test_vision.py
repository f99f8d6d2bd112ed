"""Requests with images beside steps in graphs: positions of their rows differ from lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runtime.models.layers.build_context import BuildContext
from runtime.models.registry import model_class, read_model_spec
from runtime.weights.fill import load_weights
from runtime.weights.load_model import dummy_tensors
from tests.support.engine import InProcessEngine
from tests.support.gpu import DEVICE, count_graphs, in_both_precisions, on_gpu, small_engine
from tests.support.tiny_models import edit_json
from tests.support.tiny_vision import (
    NUM_NEW,
    PROMPTS,
    TINY_VISION,
    WIDE,
    Prompt,
    copy_of,
    picture,
    pixels,
    prompt_of,
    tiny_vision,
)

pytestmark = pytest.mark.also_cpu
in_all_families = pytest.mark.parametrize("name", list(TINY_VISION))


def add(engine: InProcessEngine, number: int, prompt: Prompt) -> None:
    engine.add(number, prompt.ids, NUM_NEW, ignore_eos=True, images=prompt.images)


def generate(engine: InProcessEngine, prompt: Prompt) -> list[int]:
    number = max(engine.tokens, default=0) + 1
    add(engine, number, prompt)
    engine.run()
    return engine.tokens[number]


# The kernels of recurrent states are not recorded on a CPU.
@in_both_precisions
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", pytest.param("qwen3_5", marks=on_gpu)])
def test_images_beside_text_in_graphs_equal_eager(
    name: str, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_engine(tiny_vision(name), disable_cuda_graph=True)
    expected = [generate(plain, prompt) for prompt in PROMPTS]
    engine = small_engine(tiny_vision(name))
    counts = count_graphs(engine, monkeypatch)
    # The second time with the prompts' beginnings cached, on rows that had other images.
    for first, order in ((1, 1), (101, -1)):
        for number, prompt in list(enumerate(PROMPTS, first))[::order]:
            add(engine, number, prompt)
            # They join a batch that is running.
            engine.scheduler.step()
        engine.run()
        assert [engine.tokens[first + i] for i in range(len(PROMPTS))] == expected
    assert counts["decode"] >= NUM_NEW


# Prompts of a model with recurrent states have no graphs.
@in_both_precisions
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_question_behind_a_cached_picture_has_a_graph(
    name: str, graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are text, but their positions are not their places."""
    question = prompt_of(14, WIDE, 17, seed=3)
    expected = generate(small_engine(tiny_vision(name), disable_cuda_graph=True), question)
    engine = small_engine(tiny_vision(name))
    generate(engine, prompt_of(14, WIDE, 5, seed=3))
    counts = count_graphs(engine, monkeypatch)
    assert generate(engine, question) == expected
    assert engine.cached[2] >= 15 + WIDE.num_tokens
    assert counts["prompt"] == 1
    assert engine.shared["images_computed_total"] == 1


# Widths and heads of the towers as they are published, of few blocks.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
        "window_size": 112,
    },
    "qwen3_vl": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "num_position_embeddings": 2304,
    },
    "qwen3_5": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
        "num_position_embeddings": 2304,
    },
}  # fmt: skip


@pytest.mark.also_cpu(asked=True)
@in_all_families
def test_wide_towers_in_bfloat16_are_close_to_float32(name: str, tmp_path: Any) -> None:
    folder = copy_of(name, tmp_path / name)
    config = read_model_spec(folder).raw["vision_config"]
    edit_json(folder / "config.json", vision_config={**config, **SHAPES[name]})
    (folder / "preprocessor_config.json").unlink()
    spec = read_model_spec(folder)
    cell = spec.image_cell
    images = [picture(9, 6, 1, cell), picture(1, 1, 2, cell), picture(5, 12, 3, cell)]
    found = {}
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, DEVICE)):
        context = BuildContext(dtype=dtype, device=torch.device(device))
        model: Any = model_class(spec)(spec, context)
        weights = dummy_tensors(spec, 0, torch.device("cpu"))
        load_weights(model, ((key, tensor.to(device)) for key, tensor in weights))
        with torch.inference_mode():
            found[device, dtype] = model.visual.see([pixels(each).to(device) for each in images])
    truth, rounded = found.values()
    for wanted, ours in zip(truth, rounded, strict=True):
        assert ours.dtype is torch.bfloat16
        error = (ours.float().cpu() - wanted).norm() / wanted.norm()
        assert float(error) < 0.02
