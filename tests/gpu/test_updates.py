"""Weights change under captured graphs: results equal a fresh engine with the new weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save

from headrace.trainer import SharedTensors
from runtime.ipc.weight_messages import (
    CheckAction,
    CheckWeights,
    LoadFolder,
    LoadSharedMemory,
    LoadTensors,
    ReadWeight,
    WeightPart,
)
from runtime.weights import weight_files as files
from tests.support.engine import InProcessEngine
from tests.support.gpu import (
    PROMPTS,
    Answers,
    answers,
    assert_same,
    count_graphs,
    graphs_of,
    in_both_precisions,
    small_engine,
)
from tests.support.tiny_models import other_weights, tiny_model

pytestmark = [pytest.mark.also_cpu, in_both_precisions]

K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@dataclass
class Case:
    """An engine with its first weights, others, and the answers of both."""

    engine: InProcessEngine
    old: Path
    new: Path
    before: Answers
    after: Answers

    @property
    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return list(load_file(self.new / "model.safetensors").items())


# Biases, which are no part of a matrix; then a head that is the embeddings.
@pytest.fixture(scope="module", params=["llama_biased", "llama_tied"])
def case(
    request: pytest.FixtureRequest, graphs: None, tmp_path_factory: pytest.TempPathFactory
) -> Case:
    old = tiny_model(request.param)
    new = other_weights(request.param, tmp_path_factory.mktemp("new") / request.param)
    after = answers(small_engine(new, disable_cuda_graph=True))
    engine = small_engine(old)
    before = answers(engine)
    assert all(mine[0] != theirs[0] for mine, theirs in zip(before, after, strict=True))
    return Case(engine, old, new, before, after)


@pytest.fixture(autouse=True)
def first_weights(case: Case) -> Iterator[None]:
    """The same graphs serve all tests: nothing here captures them again."""
    captured = graphs_of(case.engine)
    yield
    assert case.engine.ask(LoadFolder(str(case.old)), flush_cache=True).success
    assert graphs_of(case.engine) == captured


def from_disk(case: Case) -> None:
    assert case.engine.ask(LoadFolder(str(case.new)), flush_cache=True).success


def halves(case: Case) -> list[list[tuple[str, torch.Tensor]]]:
    """All tensors in two parts, which cut fused layers."""
    return [case.tensors[0::2], case.tensors[1::2]]


def from_bytes(case: Case) -> None:
    for part in halves(case):
        assert case.engine.ask(LoadTensors([save(dict(part))]), flush_cache=True).success


def from_shared_memory(case: Case) -> None:
    for part in halves(case):
        with SharedTensors(part) as shared:
            op = LoadSharedMemory(shared.body["shared_memory"])
            assert case.engine.ask(op, flush_cache=True).success


@pytest.mark.parametrize("update", [from_disk, from_bytes, from_shared_memory])
def test_graphs_compute_with_the_new_weights(
    case: Case, update: Callable[[Case], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case.engine
    captured = graphs_of(engine)
    update(case)
    assert graphs_of(engine) == captured
    counts = count_graphs(engine, monkeypatch)
    first = max(engine.tokens) + 1
    assert_same(answers(engine), case.after)
    assert counts["decode"] > 0
    assert counts["prompt"] > 0
    assert engine.cached[first] == 0, "a prefix of other weights was found"


@pytest.mark.also_cpu(asked=True)
def test_tensors_are_cast_to_the_type_that_serves(case: Case) -> None:
    """bfloat16 has kernels of its own; the same ones in the same batches give the same tokens."""
    options = {"dtype": "bfloat16", "max_running_requests": 8}
    engine, fresh = (small_engine(folder, **options) for folder in (case.old, case.new))
    before, after = answers(engine), answers(fresh)
    assert before[0][0] != after[0][0]
    for part in halves(case):
        assert engine.ask(LoadTensors([save(dict(part))]), flush_cache=True).success
    assert_same(answers(engine), after)
    assert engine.ask(LoadFolder(str(case.old)), flush_cache=True).success
    assert_same(answers(engine), before)


def test_the_prefix_cache_stays_where_the_trainer_says_so(case: Case) -> None:
    engine = case.engine
    for flush in (False, True):
        engine.generate(PROMPTS[0], 1)
        assert engine.ask(LoadFolder(str(case.old)), flush_cache=flush).success
        engine.generate(PROMPTS[0], 1)
        assert (engine.cached[max(engine.cached)] == 0) is flush


@pytest.mark.parametrize("came_from", ["the folder", "a trainer"])
def test_an_update_that_fails_half_way_changes_nothing(
    case: Case, came_from: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case.engine
    if came_from == "a trainer":
        tensors = load_file(case.old / "model.safetensors")
        assert engine.ask(LoadTensors([save(tensors)])).success
    read, count = files._read, iter(range(10**6))

    def broken(file: object, info: object) -> torch.Tensor:
        if next(count) == 13:
            raise OSError(5, "Input/output error")
        return read(file, info)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_read", broken)
    reply = engine.ask(LoadFolder(str(case.new)), flush_cache=True)
    assert not reply.success
    assert "Input/output error" in reply.message
    assert_same(answers(engine), case.before)
    bad = {K_PROJ: torch.zeros(3, 3)}
    assert not engine.ask(LoadTensors([save(bad)]), flush_cache=True).success
    assert_same(answers(engine), case.before)


def test_requests_that_run_go_on_with_the_new_weights(case: Case) -> None:
    """Frozen in place: old keys, new weights; with graphs as without."""
    made = {}
    eager = small_engine(case.old, disable_cuda_graph=True)
    for name, engine in {"graphs": case.engine, "eager": eager}.items():
        # Nothing is cached: both are equally far after so many steps.
        assert engine.ask(LoadFolder(str(case.old)), flush_cache=True).success
        first = max(engine.tokens, default=0) + 1
        for i, ids in enumerate(PROMPTS[:4]):
            engine.add(first + i, ids, 30, ignore_eos=True)
        for _ in range(10):
            engine.scheduler.step()
        assert engine.ask(LoadFolder(str(case.new)), flush_cache=True).success
        engine.run()
        made[name] = [engine.tokens[first + i] for i in range(4)]
    assert made["graphs"] == made["eager"]
    assert any(ids[:20] != old for ids, (old, _) in zip(made["eager"], case.before, strict=False))


def test_every_weight_is_read_as_it_was_sent(case: Case, precision: str) -> None:
    update = case.engine.ask(LoadFolder(str(case.new)), flush_cache=True)
    assert update.success
    for name, tensor in case.tensors:
        reply = case.engine.ask(ReadWeight(name, 10**6))
        part = msgspec.msgpack.decode(reply.data, type=WeightPart)
        held = torch.frombuffer(bytearray(part.data), dtype=torch.float32).view(part.shape)
        assert torch.equal(held, tensor.to(getattr(torch, precision)).float()), name


def test_the_checker_sees_the_weights_of_the_device(case: Case) -> None:
    engine = case.engine

    def check(action: CheckAction) -> tuple[bool, str]:
        reply = engine.ask(CheckWeights(action), flush_cache=action == "reset_tensors")
        return reply.success, reply.message

    checksum = check("checksum")
    assert check("snapshot")[0]
    assert check("compare")[0]
    one = dict(case.tensors)[K_PROJ]
    assert engine.ask(LoadTensors([save({K_PROJ: one})])).success
    is_same, message = check("compare")
    assert not is_same
    assert f"1 tensor different from the snapshot ({K_PROJ})" in message
    assert check("reset_tensors")[0]
    assert answers(engine)[0][0] != case.before[0][0]
    assert engine.ask(LoadFolder(str(case.old)), flush_cache=True).success
    assert check("compare")[0]
    assert check("checksum") == checksum
