"""Memory is released and allocated again: graphs are captured again, and answers stay the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from runtime.executor.device_memory import give_back
from runtime.ipc.weight_messages import (
    LoadFolder,
    LoadTensors,
    MemoryTag,
    ReleaseMemory,
    ResumeMemory,
)
from tests.support.engine import InProcessEngine
from tests.support.fake_checkpoint import expected_tensors, write_config
from tests.support.gpu import (
    DEVICE,
    Answers,
    answers,
    assert_same,
    count_graphs,
    graph_runner,
    graphs_of,
    on_gpu,
    small_engine,
)

# On a GPU 200 MB of weights and 256 of pages, so that both show.
WIDTH = 1024 if DEVICE == "cuda" else 64
NUM_TOKENS = (256 if DEVICE == "cuda" else 8) * 1024
# Recording takes its time, and is done at every resume.
NUM_ROWS = 96 if DEVICE == "cuda" else 8
MIB = 1 << 20


def wide_model(folder: Path, seed: int) -> Path:
    write_config(
        folder,
        vocab_size=512,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=4,
        head_dim=16,
        max_position_embeddings=256,
        torch_dtype="float32",
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in expected_tensors(folder).items():
        noise = torch.randn(shape, generator=generator)
        gain = 4.0 if "lm_head" in name or "embed" in name else 1.0
        is_norm = len(shape) == 1
        tensors[name] = 1 + 0.2 * noise if is_norm else gain * noise / shape[-1] ** 0.5
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@dataclass
class Case:
    """An engine with its first weights, others, and the answers of both."""

    engine: InProcessEngine
    old: Path
    new: Path
    before: Answers
    after: Answers


@pytest.fixture(scope="module")
def case(graphs: None, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("wide")
    old, new = wide_model(folder / "old", 0), wide_model(folder / "new", 1)
    after = answers(small_engine(new, disable_cuda_graph=True))
    engine = small_engine(old, max_total_tokens=NUM_TOKENS, max_running_requests=NUM_ROWS)
    return Case(engine, old, new, answers(engine), after)


@pytest.fixture(autouse=True)
def everything_is_there(case: Case) -> Iterator[None]:
    yield
    assert case.engine.ask(ResumeMemory([])).success
    assert case.engine.ask(LoadFolder(str(case.old)), flush_cache=True).success


def assert_serves_with_new_graphs(
    engine: InProcessEngine, dropped: list[object], expected: Answers, patch: pytest.MonkeyPatch
) -> None:
    captured = graphs_of(engine)
    assert len(captured) == len(dropped)
    assert not any(new is old for new in captured for old in dropped)
    counts = count_graphs(engine, patch)
    first = max(engine.tokens) + 1
    assert_same(answers(engine), expected)
    assert counts["decode"] > 0
    assert counts["prompt"] > 0
    assert engine.cached[first] == 0, "what was computed before was found"


RELEASED: list[list[MemoryTag]] = [
    [],
    ["kv_cache"],
    ["weights"],
    ["weights", "kv_cache"],
    ["cuda_graph"],
]


@pytest.mark.also_cpu
@pytest.mark.parametrize(
    ("came_from", "tags"),
    [*(("the folder", tags) for tags in RELEASED), ("a trainer", []), ("a trainer", ["weights"])],
    ids=str,
)
def test_answers_are_the_same_afterwards(
    case: Case, came_from: str, tags: list[MemoryTag], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case.engine
    if came_from == "a trainer":
        # No file holds them: the host keeps a copy.
        tensors = load_file(case.old / "model.safetensors")
        assert engine.ask(LoadTensors([save(tensors)]), flush_cache=True).success
    captured = graphs_of(engine)
    assert engine.ask(ReleaseMemory(tags)).success
    assert graphs_of(engine) == []
    if tags == ["cuda_graph"]:
        assert engine.can_compute
        assert_same(answers(engine), case.before)
        assert engine.ask(ReleaseMemory([])).success
    else:
        assert not engine.can_compute
    assert engine.ask(ResumeMemory([])).success
    assert_serves_with_new_graphs(engine, captured, case.before, monkeypatch)


@pytest.mark.also_cpu
@pytest.mark.parametrize("came", ["weights, tensors, pages", "folder, pages", "pages, folder"])
def test_a_trainers_way_through_a_step(
    case: Case, came: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release for the optimizer; resume part by part, with the new weights in between."""
    engine = case.engine
    captured = graphs_of(engine)
    assert engine.ask(ReleaseMemory([])).success
    if came == "weights, tensors, pages":
        assert engine.ask(ResumeMemory(["weights"])).success
        assert graphs_of(engine) == [], "there are no pages to capture them with"
        tensors = load_file(case.new / "model.safetensors")
        assert engine.ask(LoadTensors([save(tensors)]), flush_cache=True).success
        assert engine.ask(ResumeMemory(["kv_cache", "cuda_graph"])).success
    elif came == "folder, pages":
        assert engine.ask(LoadFolder(str(case.new)), flush_cache=True).success
        assert engine.ask(ResumeMemory([])).success
    else:
        assert engine.ask(ResumeMemory(["kv_cache"])).success
        assert graphs_of(engine) == [], "there are no weights to capture them with"
        assert engine.ask(LoadFolder(str(case.new)), flush_cache=True).success
    assert_serves_with_new_graphs(engine, captured, case.after, monkeypatch)


@contextmanager
def no_room(engine: InProcessEngine, patch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cpu":

        def fail() -> Any:
            raise torch.OutOfMemoryError("planted")

        memory: Any = engine.scheduler._weights._rank._memory  # type: ignore[union-attr]
        with patch.context() as until_then:
            until_then.setattr(memory, "_allocate", fail)
            yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * MIB) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.also_cpu
@pytest.mark.parametrize("tags", RELEASED[:3], ids="+".join)
def test_a_resume_without_room_can_be_tried_again(
    case: Case, tags: list[MemoryTag], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cpu" and tags == ["weights"]:
        pytest.skip("the CPU form has no room for pages only")
    engine = case.engine
    captured = graphs_of(engine)
    assert engine.ask(ReleaseMemory(tags)).success
    with no_room(engine, monkeypatch):
        reply = engine.ask(ResumeMemory([]))
    assert not reply.success
    assert reply.message.startswith("Not enough memory")
    assert not engine.can_compute
    assert engine.ask(ResumeMemory([])).success
    assert_serves_with_new_graphs(engine, captured, case.before, monkeypatch)


@contextmanager
def capture_fails(
    engine: InProcessEngine, number: int, patch: pytest.MonkeyPatch
) -> Iterator[None]:
    """The graph of this number does not fit."""
    pool, numbers = graph_runner(engine)._pool, iter(range(1000))
    capture = pool.capture

    def fail(work: Any) -> Any:
        if next(numbers) == number:
            raise torch.OutOfMemoryError("planted")
        return capture(work)

    with patch.context() as until_then:
        until_then.setattr(pool, "capture", fail)
        yield


@pytest.mark.also_cpu
@pytest.mark.parametrize("is_last", [True, False], ids=["decode", "prompt"])
def test_no_graphs_are_better_than_some(
    case: Case, is_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that fails half-way leaves none: steps run without, and it is tried again."""
    engine = case.engine
    captured = graphs_of(engine)
    # Smaller steps come later; the last of all is for shared prefixes, and may fail.
    number = len(captured) - 2 if is_last else 2
    assert engine.ask(ReleaseMemory([])).success
    with capture_fails(engine, number, monkeypatch):
        reply = engine.ask(ResumeMemory([]))
    assert not reply.success
    assert reply.message == "Not enough memory: planted"
    assert graphs_of(engine) == []
    assert_same(answers(engine), case.before)
    # The weights of an update are there all the same.
    assert engine.ask(ReleaseMemory(["weights"])).success
    with capture_fails(engine, number, monkeypatch):
        assert engine.ask(LoadFolder(str(case.new)), flush_cache=True).success
    assert graphs_of(engine) == []
    assert_same(answers(engine), case.after)
    assert engine.ask(LoadFolder(str(case.old)), flush_cache=True).success
    assert_serves_with_new_graphs(engine, captured, case.before, monkeypatch)


def used_bytes() -> tuple[int, int]:
    """Of the GPU: what this process reserves, and what anybody has."""
    give_back()
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_reserved(), total - free


@on_gpu
def test_the_device_has_its_memory_again(case: Case) -> None:
    engine = case.engine
    weights, pages = engine.ready.weight_bytes, engine.ready.kv_bytes
    assert weights > 150 * MIB
    assert pages > 150 * MIB
    at_first = used_bytes()
    expected: dict[MemoryTag, int] = {"weights": weights, "kv_cache": pages}
    for tag, size in expected.items():
        assert engine.ask(ReleaseMemory([tag])).success
        for before, after in zip(at_first, used_bytes(), strict=True):
            assert before - after > 0.95 * size, tag
        assert engine.ask(ResumeMemory([])).success
    assert engine.ask(ReleaseMemory(["cuda_graph"])).success
    assert used_bytes()[0] < at_first[0]
    assert engine.ask(ResumeMemory([])).success
    ends = []
    for _ in range(6):
        assert engine.ask(ReleaseMemory([])).success
        for before, after in zip(at_first, used_bytes(), strict=True):
            assert before - after > 0.95 * (weights + pages)
        assert engine.ask(ResumeMemory([])).success
        ends.append(used_bytes())
    # A trainer does this at every step.
    for first, last in zip(ends[0], ends[-1], strict=True):
        assert last <= first + 32 * MIB
    assert_same(answers(engine), case.before)
