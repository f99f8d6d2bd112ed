"""Vision models against `transformers` on the same weights and pixels, in every schedule."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from functools import cache
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from runtime.executor.image_store import ImageStore, see_the_largest
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.weight_messages import LoadFolder, ReleaseMemory, ResumeMemory
from runtime.step.step_plan import ImageSpan, StepPlan
from tests.support.engine import DEVICE, InProcessEngine
from tests.support.tiny_vision import (
    DOT,
    NUM_NEW,
    PROMPTS,
    SQUARE,
    TALL,
    TINY_VISION,
    WIDE,
    Prompt,
    Reference,
    picture,
    pixels,
    prompt_of,
    tiny_vision,
)

in_all_families = pytest.mark.parametrize("name", list(TINY_VISION))
reference = cache(lambda name: Reference(tiny_vision(name)))


@cache
def expected(name: str) -> list[list[int]]:
    """What `transformers` generates for `PROMPTS`."""
    return [reference(name).greedy(prompt, NUM_NEW) for prompt in PROMPTS]


def add(engine: InProcessEngine, number: int, prompt: Prompt, **options: Any) -> None:
    count = options.pop("count", NUM_NEW)
    engine.add(number, prompt.ids, count, ignore_eos=True, images=prompt.images, **options)


def generate(engine: InProcessEngine, prompt: Prompt) -> list[int]:
    number = max(engine.tokens, default=0) + 1
    add(engine, number, prompt)
    engine.run()
    return engine.tokens[number]


def computed(engine: InProcessEngine) -> int:
    return int(engine.shared["images_computed_total"])


@in_all_families
def test_features_equal_transformers(name: str) -> None:
    """Images that are computed together do not see one another."""
    images = [WIDE, DOT, TALL, SQUARE]
    model = InProcessEngine(tiny_vision(name)).model
    shown = [pixels(image).to(model.context.device) for image in images]
    with torch.inference_mode():
        together = [each.cpu() for each in model.visual.see(shown)]
        alone = [model.visual.see([image])[0].cpu() for image in shown]
    for ours, single, theirs in zip(together, alone, reference(name).features(images), strict=True):
        scale = float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * scale)
        torch.testing.assert_close(single, theirs, rtol=0, atol=1e-5 * scale)


@in_all_families
@pytest.mark.parametrize("chunk", [-1, 7])
def test_logits_equal_transformers(name: str, chunk: int) -> None:
    """Of every position of a prompt, whole and cut within its images."""
    engine = InProcessEngine(tiny_vision(name), chunked_prefill_size=chunk)
    for number, prompt in enumerate(PROMPTS, 1):
        add(engine, number, prompt, logprobs=LogprobSpec(0), count=1)
        engine.run()
        theirs = reference(name).logits(prompt).log_softmax(-1)
        wanted = [float(theirs[at, token]) for at, token in enumerate(prompt.ids[1:])]
        found = [each.logprob for each in engine.inputs[number]]
        assert found[-len(wanted) :] == pytest.approx(wanted, abs=2e-3)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"chunked_prefill_size": 5},
    "overlap and chunked": {"overlap": True, "chunked_prefill_size": 7},
    "retracted": {"max_total_tokens": 160, "page_size": 4, "chunked_prefill_size": 16},
    "retracted and overlap": {"max_total_tokens": 160, "page_size": 4, "overlap": True},
    "small pages": {"page_size": 1},
    "no prefix cache": {"disable_radix_cache": True},
    "reference attention": {"attention_backend": "torch"},
    "no room for images": {"image_cache_mb": 0, "chunked_prefill_size": 5, "overlap": True},
    "deterministic": {"deterministic": True},
}


@pytest.mark.parametrize("way", list(WAYS))
@in_all_families
def test_greedy_equals_transformers_beside_others(name: str, way: str) -> None:
    """Requests with images and without, in one batch, twice."""
    engine = InProcessEngine(tiny_vision(name), **WAYS[way])
    for first in (1, 101):
        for number, prompt in enumerate(PROMPTS, first):
            add(engine, number, prompt)
        engine.run()
        assert [engine.tokens[first + i] for i in range(len(PROMPTS))] == expected(name)
    if "retracted" in way:
        assert engine.shared["num_retractions_total"] > 0
    # Each picture once: neither the second time nor the second part of one, nor a retraction.
    assert computed(engine) == 4 or way == "no room for images"


@in_all_families
def test_a_second_question_finds_picture_and_prefix(name: str) -> None:
    engine = InProcessEngine(tiny_vision(name), page_size=4)
    first, second = prompt_of(5, WIDE, 7, seed=1), prompt_of(5, WIDE, 9, seed=1)
    generate(engine, first)
    assert computed(engine) == 1
    assert generate(engine, second) == reference(name).greedy(second, NUM_NEW)
    # All of the picture is in the prefix, so that not even its vectors are read.
    assert engine.cached[2] >= 5 + WIDE.num_tokens
    assert (computed(engine), engine.shared["image_cache_hits_total"]) == (1, 0)
    behind_other_text = prompt_of(8, WIDE, 9, seed=2)
    assert generate(engine, behind_other_text) == reference(name).greedy(behind_other_text, NUM_NEW)
    assert engine.cached[3] == 0
    assert (computed(engine), engine.shared["image_cache_hits_total"]) == (1, 1)


@in_all_families
@pytest.mark.parametrize("page_size", [1, 4])
def test_equal_text_about_other_pictures_shares_no_picture(name: str, page_size: int) -> None:
    engine = InProcessEngine(tiny_vision(name), page_size=page_size)
    # A recurrent state is kept where prompts part once the second one has parted.
    num_without = 2 if engine.model.spec.is_recurrent else 1
    for number, image in enumerate([picture(3, 5, 1), picture(3, 5, 9), picture(5, 3, 1)], 1):
        prompt = prompt_of(5, image, 7, seed=1)
        assert generate(engine, prompt) == reference(name).greedy(prompt, NUM_NEW)
        # The text ahead is the same: five tokens and the one that begins a picture.
        found = 0 if number <= num_without else 6 // page_size * page_size
        assert engine.cached[number] == found
    assert computed(engine) == 3


@in_all_families
def test_a_prompt_that_waits_for_the_same_picture(name: str) -> None:
    """Both arrive at once; the second goes on where the first has come."""
    engine = InProcessEngine(tiny_vision(name), page_size=4)
    long = picture(8, 9, 5)
    prompts = [prompt_of(5, long, 7, seed=1), prompt_of(5, long, 9, seed=1)]
    for number, prompt in enumerate(prompts, 1):
        add(engine, number, prompt)
    engine.run()
    for number, prompt in enumerate(prompts, 1):
        assert engine.tokens[number] == reference(name).greedy(prompt, NUM_NEW)
    assert engine.cached[2] >= long.num_tokens
    assert computed(engine) == 1


def test_a_picture_that_is_cut_stays_until_it_is_read() -> None:
    engine = InProcessEngine(tiny_vision("qwen3_vl"), image_cache_mb=0, chunked_prefill_size=5)
    assert generate(engine, PROMPTS[0]) == expected("qwen3_vl")[0]
    assert computed(engine) == 1


def test_room_for_one_picture_keeps_the_latest() -> None:
    name, page = "qwen2_5_vl", {"disable_radix_cache": True}
    # Of 64 float32 numbers a token: 4,096 tokens, of which each has more than half.
    engine = InProcessEngine(
        tiny_vision(name), image_cache_mb=1, context_len=8192, max_total_tokens=16384, **page
    )
    first, second = picture(52, 48, 1), picture(48, 52, 2)
    for image, total in ((first, 1), (first, 1), (second, 2), (second, 2), (first, 3)):
        add(engine, total * 10 + computed(engine), prompt_of(2, image, 2), count=1)
        engine.run()
        assert computed(engine) == total
        assert engine.shared["image_cache_bytes"] == image.num_tokens * 256


@in_all_families
def test_a_picture_that_cannot_be_computed_ends_its_request_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InProcessEngine(tiny_vision(name), overlap=True)
    tower = engine.model.visual
    see = tower.see

    def refuse(images: list[torch.Tensor]) -> Any:
        if any(image.shape[1] == TALL.size[1] for image in images):
            raise RuntimeError("planted")
        return see(images)

    monkeypatch.setattr(tower, "see", refuse)
    for number, prompt in enumerate(PROMPTS[:4], 1):
        add(engine, number, prompt)
    engine.run()
    # The square is as tall.
    assert [engine.reasons[number].status_code for number in range(1, 5)] == [None, 500, 500, None]
    assert [engine.tokens[number] for number in (1, 4)] == [expected(name)[i] for i in (0, 3)]
    monkeypatch.undo()
    assert generate(engine, PROMPTS[1]) == expected(name)[1]
    assert generate(engine, PROMPTS[2]) == expected(name)[2]


def test_a_step_that_fails_gives_up_what_it_was_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything was dropped, so that those that are tried alone must."""
    name = "qwen2_5_vl"
    engine = InProcessEngine(tiny_vision(name), image_cache_mb=0)
    see, kept = engine.model.visual.see, []

    def note(images: list[torch.Tensor]) -> Any:
        seen = see(images)
        kept.extend(weakref.ref(vectors) for vectors in seen)
        return seen

    monkeypatch.setattr(engine.model.visual, "see", note)
    add(engine, 1, prompt_of(2, WIDE, 2), count=1)
    engine.run()
    # No size that has so many tokens: its request cannot take its row.
    bad = msgspec.structs.replace(DOT, num_tokens=DOT.num_tokens + 1, digest=b"bad".ljust(16))
    other = prompt_of(3, TALL, 2, SQUARE, 3)
    add(engine, 2, prompt_of(4, bad, 2))
    add(engine, 3, other)
    engine.run()
    assert engine.reasons[2].status_code == 500
    assert engine.tokens[3] == reference(name).greedy(other, NUM_NEW)
    assert kept[0]() is None


def test_a_burst_of_images_is_shared_out_among_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that streams beside it go on: a step's images count twice, for the tower and as tokens."""
    engine = InProcessEngine(tiny_vision("qwen2_5_vl"), chunked_prefill_size=128)
    tower = engine.model.visual
    see, packs = tower.see, []

    def count(images: list[torch.Tensor]) -> Any:
        packs.append(len(images))
        return see(images)

    monkeypatch.setattr(tower, "see", count)
    # Of 28 tokens each, and three more: two of them take most of a step. Then these are streams,
    # beside which images take a quarter.
    for number in range(1, 5):
        add(engine, number, prompt_of(picture(4, 7, number), 1, seed=number))
    engine.run()
    assert packs == [2, 1, 1]
    # One is never too large.
    add(engine, 9, prompt_of(picture(8, 9, 9), 1, picture(1, 1, 8)))
    engine.run()
    assert packs[3:] == [1, 1]


def test_the_largest_that_a_tower_computes_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU leaves room for: as many of the largest images as a pack has, or one."""
    model = InProcessEngine(tiny_vision("qwen3_vl")).model
    seen: list[list[torch.Size]] = []
    monkeypatch.setattr(
        model.visual, "see", lambda images: seen.append([image.shape for image in images])
    )
    see_the_largest(model)
    see_the_largest(model, 64)
    assert seen == [[(3, 64, 64)] * 512, [(3, 64, 64)]]


@pytest.mark.parametrize("name", list(TINY_VISION))
def test_a_gpu_computes_packs_of_few_sizes_and_the_same_vectors(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library looks long for how to compute products of a size that it has not met."""
    engine = InProcessEngine(tiny_vision(name))
    tower, vision, see = engine.model.visual, engine.model.spec.vision, engine.model.visual.see
    cell = vision.patch_size * vision.merge_size
    sizes: list[int] = []

    def count(images: list[torch.Tensor]) -> Any:
        sizes.append(sum(image[0].numel() // cell**2 for image in images))
        return see(images)

    monkeypatch.setattr(tower, "see", count)
    padded, plain = (ImageStore(tower, vision, torch.device(DEVICE), pads=p) for p in (True, False))
    for rows, columns in ((1, 1), (3, 5), (8, 9), (9, 8), (7, 11)):
        image = picture(rows, columns, rows)
        plan: Any = SimpleNamespace(image_drops=[], image_loads=[image])
        found = []
        for store in (padded, plain):
            store.update(plan)
            span = ImageSpan(0, rows * columns, 0, image.digest)
            step: Any = SimpleNamespace(image_spans=[span])
            found.append(store.tokens_of(step, np.arange(rows * columns)).vectors)
        torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert sizes[::2] == [64, 64, 128, 128, 128]
    assert set(sizes[::2]) <= set(padded.pack_sizes())
    assert len(padded.pack_sizes()) < 200
    sizes.clear()
    monkeypatch.setattr(padded, "pack_sizes", lambda: [64, 128])
    padded.warm_up()
    assert sizes == [64, 128]


def test_beside_streams_the_tower_is_a_step_ahead_of_its_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Streams wait for the tower or for the decoder, not for both in one step."""
    engine = InProcessEngine(tiny_vision("qwen2_5_vl"))
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def note(plan: StepPlan, *masks: Any) -> Any:
        plans.append(plan)
        return launch(plan, *masks)

    monkeypatch.setattr(engine.runner, "launch", note)
    # Alone it is computed in the step that reads it.
    add(engine, 1, PROMPTS[0])
    engine.run()
    assert [bool(plan.image_loads) for plan in plans[:2]] == [True, False]
    assert plans[0].image_spans
    engine.add(2, PROMPTS[3].ids, 60, ignore_eos=True)
    engine.scheduler.step()
    plans.clear()
    add(engine, 3, PROMPTS[1])
    engine.run()
    loading = [index for index, plan in enumerate(plans) if plan.image_loads]
    reading = [index for index, plan in enumerate(plans) if plan.image_spans]
    assert loading == [0]
    assert min(reading) == 1
    assert engine.tokens[3] == expected("qwen2_5_vl")[1]


def test_images_for_a_model_that_sees_none_are_refused() -> None:
    from tests.support.tiny_models import tiny_model

    engine = InProcessEngine(tiny_model("qwen2"))
    add(engine, 1, PROMPTS[0])
    engine.run()
    assert engine.reasons[1].status_code == 400
    assert engine.reasons[1].message == "This model takes no images."


def test_an_image_that_is_cut_off_is_refused() -> None:
    engine = InProcessEngine(tiny_vision("qwen2_5_vl"))
    prompt = PROMPTS[0]
    engine.add(1, prompt.ids[:15], 4, images=prompt.images)
    engine.run()
    assert engine.reasons[1].status_code == 400


@in_all_families
def test_other_weights_see_the_picture_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_vision(name)
    engine = InProcessEngine(folder)
    see, kept = engine.model.visual.see, []

    def note(images: list[torch.Tensor]) -> Any:
        seen = see(images)
        kept.extend(weakref.ref(vectors) for vectors in seen)
        return seen

    monkeypatch.setattr(engine.model.visual, "see", note)
    assert generate(engine, PROMPTS[0]) == expected(name)[0]
    assert engine.ask(LoadFolder(str(folder)), flush_cache=True).success
    assert generate(engine, PROMPTS[0]) == expected(name)[0]
    assert computed(engine) == 2
    assert [vectors() is None for vectors in kept] == [True, False]
    assert engine.ask(ReleaseMemory([])).success
    assert [vectors() is None for vectors in kept] == [True, True]
    assert engine.ask(ResumeMemory([])).success
    assert generate(engine, PROMPTS[0]) == expected(name)[0]
    assert computed(engine) == 3


@in_all_families
def test_two_ranks_see_alike(name: str) -> None:
    """In a process of their own, which ends with them."""
    command = [sys.executable, "-m", "tests.support.vision_ranks", str(tiny_vision(name))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == expected(name)
