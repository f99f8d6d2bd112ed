"""What only a GPU can show of the engine step: no waiting in it, and memory that runs out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.bench.shapes import write_shape
from runtime.executor import model_runner
from runtime.extras.logprobs.positions import LogprobSpec
from runtime.requests.sampling_params import GrammarSpec
from tests.support.engine import InProcessEngine
from tests.support.fake_checkpoint import write_config
from tests.support.gpu import DEVICE, graph_runner
from tests.support.grammar_backends import BACKENDS

# A prompt of so many tokens.
LONG = 16_000 if DEVICE == "cuda" else 1000
CUDA: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "load_format": "dummy",
    "context_len": 16384,
    "max_total_tokens": 40_000,
    "max_running_requests": 32,
    "chunked_prefill_size": 16384,
    "overlap": True,
    "disable_radix_cache": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 5},
    "cut": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "bias": {"logit_bias": {7: 2.0}, "min_new_tokens": 20},
}
if BACKENDS:
    # Masks come from the host in every step.
    digits = GrammarSpec("regex", "[0-9]{400}")
    KINDS["grammar"] = {"grammar": digits}
    KINDS["grammar, drawn"] = {"grammar": digits, "temperature": 1.0, "seed": 6, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("0.5b", tmp_path_factory.mktemp("shape"))


@pytest.fixture
def errors_on_sync() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(1, 150_000, length).tolist()


def run_watched(engine: InProcessEngine, num_steps: int, *, may_wait: bool) -> None:
    """Run to the end; a wait for the device in the first steps is an error unless it may be."""
    torch.cuda.set_sync_debug_mode("default" if may_wait else "error")
    for _ in range(num_steps):
        engine.scheduler.step()
    torch.cuda.set_sync_debug_mode("default")
    engine.run()
    assert all(reason.type == "length" for reason in engine.reasons.values())


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_step_waits_for_nothing(folder: Path, graphs: bool, errors_on_sync: None) -> None:
    grammars = BACKENDS[0] if BACKENDS else "none"
    engine = InProcessEngine(
        folder, **CUDA, disable_cuda_graph=not graphs, grammar_backend=grammars
    )
    for round_number in range(2):
        for i, options in enumerate(KINDS.values()):
            logprobs = LogprobSpec(0, 5, [9]) if i % 2 else None
            request_id = 1 + i + 10 * round_number
            engine.add(
                request_id, prompt(40 + 700 * i, i), 30, logprobs, ignore_eos=True, **options
            )
        # The first round compiles kernels and makes plans, which may wait.
        run_watched(engine, 25, may_wait=not round_number)


# A fifth of a second at 2 GHz, many times what the host needs to launch a step.
DELAY_CYCLES, DELAY_S = 400_000_000, 0.2


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_launch_returns_while_the_device_is_busy(
    folder: Path, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits of every kind show: for events, for memory of the device or the host, for plans."""
    engine = InProcessEngine(folder, **CUDA, disable_cuda_graph=not graphs)
    # A step whose masks depend on the one before is not launched behind it.
    kinds = [options for options in KINDS.values() if "grammar" not in options]
    launch, took = engine.runner.launch, []

    def timed(*args: Any, **options: Any) -> Any:
        torch.cuda._sleep(DELAY_CYCLES)
        started = time.perf_counter()
        pending = launch(*args, **options)
        took.append(time.perf_counter() - started)
        return pending

    monkeypatch.setattr(engine.runner, "launch", timed)
    for round_number in range(2):
        # The first round fills the allocators' caches, as far as steps under way keep memory.
        took.clear()
        for i, options in enumerate(kinds):
            logprobs = LogprobSpec(0, 5, [9]) if i % 2 else None
            engine.add(
                1 + i + 10 * round_number,
                prompt(40 + 700 * i, i),
                20,
                logprobs,
                ignore_eos=True,
                **options,
            )
        engine.run()
    assert len(took) >= 18
    # One of them may have met the collector of Python, or another program.
    assert sorted(took)[-2] < DELAY_S / 2, [round(each, 3) for each in took]


def test_steps_that_share_a_prefix_wait_for_nothing(
    folder: Path, errors_on_sync: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached prompts, the groups that are sent ahead of a step, and reported hidden states."""
    options = CUDA | {"disable_radix_cache": False, "enable_return_hidden_states": True}
    engine = InProcessEngine(folder, **options)
    prefixes = graph_runner(engine)._prefixes
    assert prefixes is not None
    send, num_sent = prefixes.send, 0

    def send_and_count() -> None:
        nonlocal num_sent
        num_sent += 1
        send()

    monkeypatch.setattr(prefixes, "send", send_and_count)
    shared = prompt(4000)
    for round_number in range(2):
        for i in range(30):
            request_id = 1 + i + 100 * round_number
            engine.add(
                request_id,
                shared + prompt(20 + i, request_id),
                40,
                hidden_states="" if i % 10 else "last",
                ignore_eos=True,
            )
        num_sent = 0
        run_watched(engine, 30, may_wait=not round_number)
        assert num_sent, "no step read the prefix once for all"


@pytest.fixture
def wide_engine(graphs: None, tmp_path: Path) -> InProcessEngine:
    """Two layers that need a gigabyte for a long prompt, and are computed in no time.

    In float32: tokens are compared, and there are no ties.
    """
    write_config(
        tmp_path,
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=8192 if DEVICE == "cuda" else 512,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=LONG + 100,
        tie_word_embeddings=False,
    )
    options = {
        "device": DEVICE,
        "dtype": "float32",
        "context_len": LONG + 100,
        "chunked_prefill_size": LONG + 100,
        "max_total_tokens": 2 * LONG,
        "max_running_requests": 8,
    }
    return InProcessEngine(tmp_path, **(CUDA | options))


@contextmanager
def little_memory(engine: InProcessEngine) -> Iterator[None]:
    """Room for short prompts, and for no long one."""
    if DEVICE == "cpu":

        def fail(forward: Any, batch: Any) -> Any:
            if len(batch.input_ids) > LONG // 2:
                raise torch.OutOfMemoryError("planted")
            return forward(batch)

        with engine.computing(fail):
            yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + 150 * 2**20
    torch.cuda.set_per_process_memory_fraction(room / total)
    try:
        yield
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() <= room
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.also_cpu(asked=True)
def test_memory_that_runs_out_ends_one_request(
    wide_engine: InProcessEngine, caplog: pytest.LogCaptureFixture
) -> None:
    # pytest keeps what is logged, and with a traceback the tensors of the step that failed.
    caplog.set_level(logging.CRITICAL + 1, model_runner.logger.name)
    engine = wide_engine
    short, long = [number % 4096 for number in prompt(100)], [3 + i % 4000 for i in range(LONG)]
    alone = engine.generate(short, 40, ignore_eos=True)
    assert len(set(alone)) > 10, "tokens that tell nothing"
    with little_memory(engine):
        engine.add(11, short, 40, ignore_eos=True)
        for _ in range(10):
            engine.scheduler.step()
        engine.add(12, long, 4)
        engine.run()
        assert engine.reasons[12].type == "abort"
        assert "OutOfMemoryError" in (engine.reasons[12].message or "")
        assert engine.tokens[11] == alone
        assert engine.generate(short, 40, ignore_eos=True) == alone
    engine.add(14, long, 4, ignore_eos=True)
    engine.run()
    assert len(engine.tokens[14]) == 4
