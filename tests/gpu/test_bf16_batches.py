"""The bf16 kernels in batches of each size that has its own tiles.

Rounding depends on the batch's size, so tokens may diverge where two of them tie, and only there.
Log-probabilities are compared up to that token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.extras.logprobs.positions import LogprobSpec
from runtime.ipc.weight_messages import ReleaseMemory, ResumeMemory
from tests.support.engine import InProcessEngine
from tests.support.gpu import graph_runner, on_gpu
from tests.support.gpu_numerics import write_model
from tests.support.ties import assert_same_but_for_ties

pytestmark = on_gpu
# Few, so that most answers end before they come to a tie.
NUM_NEW = 8
# Of log-probabilities: each way is 0.06 from float32 on average (`numerics.json`), so two are up to
# 0.09 apart, and of thousands some more than four times that far.
DIFFERENCE = 0.4
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "context_len": 512,
    "max_total_tokens": 32_768,
    "max_running_requests": 64,
    "chunked_prefill_size": 1024,
    "overlap": True,
}
# Requests are numbered alike in both engines.
SIZES = (17, 24, 33, 48, 64)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(7)
    # Some begin alike: the cache and kernels for shared prefixes have work.
    begin = rng.integers(3, 4000, 200).tolist()
    found = [rng.integers(3, 4000, 5 + 9 * i % 200).tolist() for i in range(max(SIZES))]
    return [begin + ids[:30] if i % 4 == 3 else ids for i, ids in enumerate(found)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bf16")
    write_model("LlamaForCausalLM", path)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> InProcessEngine:
    """Each request by itself."""
    engine = InProcessEngine(folder, **OPTIONS, disable_radix_cache=True)
    for i, ids in enumerate(prompts()):
        engine.add(1 + i, ids, NUM_NEW, LogprobSpec(-1, 2), ignore_eos=True)
        engine.run()
    return engine


@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_rows_of_a_batch_are_as_alone_but_for_ties(
    folder: Path, alone: InProcessEngine, num_rows: int, graphs: bool
) -> None:
    engine = InProcessEngine(folder, **OPTIONS, disable_cuda_graph=not graphs)
    numbers = range(1, num_rows + 1)
    for i in numbers:
        engine.add(i, prompts()[i - 1], NUM_NEW, LogprobSpec(-1, 2), ignore_eos=True)
    engine.run()
    equal = assert_same_but_for_ties(
        alone, engine, numbers, "bfloat16", rounding=DIFFERENCE, tie=DIFFERENCE
    )
    assert equal >= 2 * num_rows // 5


def load(engine: InProcessEngine, num_rows: int = 48) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of requests that come together."""
    first = max(engine.tokens, default=0) + 1
    for i, ids in enumerate(prompts()[:num_rows]):
        engine.add(first + i, ids, NUM_NEW, LogprobSpec(), ignore_eos=True)
    engine.run()
    return [
        (engine.tokens[first + i], [each.logprob for each in engine.outputs[first + i]])
        for i in range(num_rows)
    ]


@pytest.mark.parametrize("deterministic", [False, True], ids=["usual", "deterministic"])
def test_the_same_load_gives_the_same_bits(folder: Path, deterministic: bool) -> None:
    """Again, and after memory went back and graphs were captured anew."""
    engine = InProcessEngine(
        folder, **OPTIONS, deterministic=deterministic, disable_radix_cache=True
    )
    first = load(engine)
    assert load(engine) == first
    captured = len(graph_runner(engine).captured)
    assert engine.ask(ReleaseMemory([])).success
    assert engine.ask(ResumeMemory([])).success
    assert len(graph_runner(engine).captured) >= min(captured, 1)
    assert load(engine) == first


def test_deterministic_rows_have_the_bits_of_being_alone(folder: Path) -> None:
    """With a cache, in chunks, in graphs of other sizes."""
    options = OPTIONS | {"chunked_prefill_size": 128, "deterministic": True}
    engine = InProcessEngine(folder, **options)
    apart = []
    for ids in prompts()[:40]:
        number = max(engine.tokens, default=0) + 1
        engine.add(number, ids, NUM_NEW, LogprobSpec(), ignore_eos=True)
        engine.run()
        apart.append((engine.tokens[number], [each.logprob for each in engine.outputs[number]]))
    assert load(engine, 40) == apart
