"""The steps before the first request: which kernels they cover, and the error if one fails."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kernels.paged_attention.triton_tiles import MAX_BLOCK_ROWS, Tile, block_rows_of, extend_tile
from kernels.prompt_attention.cudnn import MIN_LENGTH
from runtime.errors import StartupError
from runtime.executor import build
from runtime.executor.out_of_memory import STEP_OUT_OF_MEMORY
from runtime.executor.warmup_steps import Prompts, compute_prompts, prompts_to_compile
from tests.support.engine import InProcessEngine
from tests.support.fake_checkpoint import write_model

MULTIPROCESSORS = 132
# Query heads, key heads, head size.
SHAPES = {"8b": (32, 8, 128), "0.5b": (14, 2, 64), "8b on four": (8, 2, 128), "mha": (32, 32, 128)}


def cut(shape: tuple[int, int, int], prompts: Prompts) -> tuple[int, Tile]:
    """Return how the extend kernel is compiled for such a step."""
    heads, kv_heads, head_dim = shape
    tokens, short = prompts.length * prompts.num_seqs, not prompts.cached
    load = tokens * heads / (MAX_BLOCK_ROWS * MULTIPROCESSORS)
    mean_rows = prompts.length * heads / kv_heads
    rows = block_rows_of(load, mean_rows, head_dim, 227 * 1024, short_prompts=short)
    return rows, extend_tile(torch.bfloat16, head_dim, rows, 227 * 1024, short_prompts=short)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("max_tokens", [600, 1200, 2500, 8192, 131_071])
@pytest.mark.parametrize("max_seqs", [1, 2, 4, 9, 64, 2048])
def test_warm_up_covers_every_tile_of_prompts(shape: str, max_tokens: int, max_seqs: int) -> None:
    context_len = 131_072
    steps = prompts_to_compile(max_tokens, context_len, max_seqs)
    met = {cut(SHAPES[shape], step) for step in steps}
    for step in steps:
        assert 1 <= step.num_seqs <= max_seqs
        assert step.length * step.num_seqs <= max_tokens
        assert step.length + step.cached < context_len
    lengths = (1, 17, 100, 256, 700, 1056, 1057, 2047, 5000, 8192)
    for length, num_seqs, cached in itertools.product(lengths, (1, 2, 4, 9, 32), (0, 1)):
        # A long prompt without a prefix has a separate kernel.
        possible = num_seqs <= max_seqs and length * num_seqs <= max_tokens
        if possible and (cached or length < MIN_LENGTH):
            assert cut(SHAPES[shape], Prompts(length, num_seqs, cached)) in met


def test_tiny_limits_leave_steps_that_fit() -> None:
    for context_len, max_tokens, max_seqs in itertools.product((2, 3, 9), (1, 2, 7), (1, 3)):
        for step in prompts_to_compile(max_tokens, context_len, max_seqs):
            assert step.length >= 1
            assert step.length * step.num_seqs <= max_tokens
            assert step.length + step.cached <= context_len


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> InProcessEngine:
    return InProcessEngine(write_model(tmp_path_factory.mktemp("model")), context_len=64)


def test_several_prompts_are_one_step(engine: InProcessEngine) -> None:
    lengths: list[list[int]] = []

    def note(forward: Any, batch: Any) -> Any:
        lengths.append(batch.seq_lens.tolist())
        return forward(batch)

    for cached in (0, 1):
        with engine.computing(note):
            compute_prompts(engine.runner, Prompts(20, 3, cached), 32)
        assert lengths == [[20 + cached] * 3]
        lengths.clear()


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(RuntimeError("no kernel"), StartupError), (torch.OutOfMemoryError(), MemoryError)],
    ids=["broken", "memory"],
)
def test_one_failing_step_of_several_is_reported(
    engine: InProcessEngine, error: Exception, becomes: type[Exception]
) -> None:
    num_alone = 0

    def fail(forward: Any, batch: Any) -> Any:
        nonlocal num_alone
        num_alone += len(batch.seq_lens) == 1
        if num_alone in (0, 3):
            raise error
        return forward(batch)

    with engine.computing(fail), pytest.raises(becomes) as told:
        compute_prompts(engine.runner, Prompts(20, 3), 32)
    assert STEP_OUT_OF_MEMORY not in str(told.value)


@pytest.mark.parametrize("min_whole", [2048, 32])
def test_a_start_like_on_a_gpu_computes_full_steps(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, min_whole: int
) -> None:
    """With a context shorter than the chunk these are several prompts.

    If prompts are so long that attention copies those whose length is not round, these are measured
    too.
    """
    monkeypatch.setattr(build, "MIN_LENGTH", min_whole)
    steps: list[Prompts] = []
    size_pool, warm_up = build._size_pool, build._warm_up
    measured: list[int] = []
    compute = build.compute_prompts

    def note(runner: Any, prompts: Prompts, *rest: Any) -> None:
        steps.append(prompts)
        compute(runner, prompts, *rest)

    def measure_too(parts: Any) -> Any:
        measured.append(build._activation_bytes(parts))
        measured.append(len(steps))
        return size_pool(parts)

    def as_on_a_gpu(runner: Any, config: Any, vocab_size: int, _: torch.device) -> None:
        warm_up(runner, config, vocab_size, torch.device("cuda"))

    monkeypatch.setattr(build, "compute_prompts", note)
    monkeypatch.setattr(build, "_size_pool", measure_too)
    monkeypatch.setattr(build, "_warm_up", as_on_a_gpu)
    monkeypatch.setattr(build, "warm_up_sampling", lambda *_: None)
    for name in ("reset_peak_memory_stats", "synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 100)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1000)
    engine = InProcessEngine(
        write_model(tmp_path_factory.mktemp("model")),
        context_len=64,
        chunked_prefill_size=300,
        max_running_requests=8,
    )
    activations, num_measured = measured
    assert activations == 900 + 8 * 32 * 8
    copied = [Prompts(62, 4)] if min_whole < 63 else []
    assert steps[:num_measured] == [Prompts(63), Prompts(63, 4), *copied]
    assert steps[num_measured:] == prompts_to_compile(300, 64, 8)
    assert steps[-1] == Prompts(62, 4, 1)
    engine.add(1, [5, 9, 20], 4, ignore_eos=True)
    engine.run()
    assert len(engine.tokens[1]) == 4
