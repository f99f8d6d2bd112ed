"""The size of the KV pool, what is logged about it, and errors for too little memory."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime.errors import StartupError
from runtime.executor import build
from runtime.executor.memory import (
    GIB,
    Budget,
    PoolSize,
    available_memory_bytes,
    cpu_budget,
    cuda_budget,
    size_pool,
)
from runtime.executor.model_runner import ModelRunner
from runtime.executor.out_of_memory import is_out_of_memory, memory_for, require_room, step_failure
from runtime.models.decoder.model import DecoderForCausalLM
from runtime.models.layers.build_context import BuildContext
from runtime.worker import build_worker
from tests.support.engine import InProcessEngine
from tests.support.fake_checkpoint import write_config
from tests.support.fake_engine import fake_model_config
from tests.support.tiny_models import tiny_model


def pool(budget: Budget, **options: Any) -> PoolSize:
    given = {
        "page_size": 16,
        "max_total_tokens": None,
        "max_running_requests": 256,
        "context_len": 8192,
        **options,
    }
    return size_pool(131072, budget=budget, **given)


def test_the_log_matches_the_pool_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (124 * GIB, 140 * GIB))
    budget = cuda_budget(None, 15 * GIB, 2 * GIB)
    with caplog.at_level(logging.INFO):
        size = pool(budget)
    # 140 x 0.9 - 16 - 2
    assert budget.size_bytes == pytest.approx(108 * GIB, abs=2)
    assert size.num_tokens == budget.size_bytes // 131072 // 16 * 16
    assert [record.message for record in caplog.records] == [
        "Memory for the KV pool, GiB: 140.0 of the GPU x 0.9 - 16.0 in use (15.0 of weights) "
        "- 2.0 for the largest step = 108.0",
        f"KV pool: {size.num_tokens} tokens = {size.num_pages} pages of 16; 131072 bytes a token, "
        "108.00 GiB of 124.00 GiB free (limited by memory)",
    ]
    half = cuda_budget(0.5, 15 * GIB, 2 * GIB)
    assert half.size_bytes == pytest.approx(52 * GIB, abs=2)
    assert "140.0 of the GPU x 0.5" in half.arithmetic


def test_the_log_matches_the_pool_of_a_cpu() -> None:
    budget = partial(cpu_budget, available_bytes=20 * GIB)
    alone, asked, shared = budget(None, GIB), budget(0.5, GIB), budget(None, GIB, 4)
    assert (alone.size_bytes, alone.arithmetic) == (8 * GIB, "(20.00 free) x 0.4 = 8.00")
    assert asked.size_bytes == 9.5 * GIB
    assert asked.arithmetic == "(20.00 free + 1.00 of weights) x 0.5 - 1.00 of weights = 9.50"
    assert shared.size_bytes == 2 * GIB
    assert shared.arithmetic == "(5.00 free, 1/4 of the machine's) x 0.4 = 2.00"
    # The same before and after the weights are loaded.
    budget = partial(cpu_budget, available_bytes=21 * GIB, unloaded_bytes=GIB)
    assert budget(None, GIB) == alone
    assert budget(0.5, GIB) == asked


def test_pools_are_not_larger_than_useful_or_requested() -> None:
    budget = Budget(100 * GIB, 120 * GIB, "")
    assert pool(budget, max_running_requests=2, context_len=1000).num_tokens == 2000
    assert pool(budget, max_total_tokens=1000).num_tokens == 992
    # The user may use memory that is reserved for others.
    assert pool(budget, max_total_tokens=850_000).size_bytes > budget.size_bytes
    with pytest.raises(StartupError, match=r"needs 122.1 GiB but only 120.0 GiB are free; lower"):
        pool(budget, max_total_tokens=1_000_000)
    with pytest.raises(StartupError, match="less than one page of 16"):
        pool(budget, max_total_tokens=15)


def test_no_room_for_a_page_shows_the_arithmetic() -> None:
    with pytest.raises(StartupError) as caught:
        pool(Budget(-5 * GIB, GIB, "80.0 of the GPU x 0.5 - 45.0 in use = -5.0"))
    message = caught.value.message
    for part in ("80.0 of the GPU x 0.5 - 45.0 in use", "raise --mem-fraction-static", "--tp-size"):
        assert part in message


def no_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 224.00 MiB.")


def no_memory_of_the_system(*_: Any, **__: Any) -> Any:
    raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes.")


PLACES = [
    (build_worker, "load_model", "the weights", "--tp-size"),
    (build, "cpu_budget", "the largest step", "--chunked-prefill-size or --max-running-requests"),
    (build, "allocate_kv", "the KV pool", "--mem-fraction-static or --max-total-tokens"),
    (build, "BatchRows", "request state and warm-up steps", "--max-running-requests"),
    # Caught like every failing step, and reported by the step's result.
    (DecoderForCausalLM, "forward", "request state and warm-up steps", "--chunked-prefill-size"),
    (ModelRunner, "capture_graphs", "CUDA graphs", "--disable-cuda-graph"),
]


@pytest.mark.parametrize("fail", [no_memory, no_memory_of_the_system])
@pytest.mark.parametrize(("owner", "name", "what", "advice"), PLACES, ids=lambda each: str(each))
def test_out_of_memory_at_start(
    owner: Any,
    name: str,
    what: str,
    advice: str,
    fail: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    folder: Path = tiny_model("llama")
    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(StartupError) as caught:
        InProcessEngine(folder)
    message = caught.value.message
    assert message.startswith(f"Out of memory for {what} (")
    assert "GiB free" in message
    assert advice in message
    assert "\n" not in message


def test_other_errors_at_start_keep_their_message() -> None:
    error = RuntimeError("cuBLAS is not what it was")
    with (
        pytest.raises(RuntimeError, match="cuBLAS is not what it was") as caught,
        memory_for("the weights", "lower it", torch.device("cpu")),
    ):
        raise error
    assert caught.value is error


def test_weights_that_cannot_fit_are_refused_before_they_are_read(tmp_path: Path) -> None:
    # There are none to read.
    folder = write_config(tmp_path, vocab_size=2**24, hidden_size=2**16)
    with pytest.raises(StartupError) as caught:
        InProcessEngine(folder, device="cpu")
    assert re.match(
        r"The weights take \d{4,}\.\d GiB in float32 and cpu has \d+\.\d GiB free: ",
        caught.value.message,
    )
    assert "--tp-size" in caught.value.message


WORDS = [
    "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in the documentation",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes.",
]


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words.splitlines()[0])
@pytest.mark.parametrize("kind", [RuntimeError, torch.AcceleratorError])
def test_every_out_of_memory_error_gets_one_line(kind: type[Exception], words: str) -> None:
    error = kind(words)
    assert is_out_of_memory(error)
    assert step_failure(error) == "Internal error: OutOfMemoryError"
    with (
        pytest.raises(
            StartupError, match=r"^Out of memory for the graphs \(.*\): lower it\.$"
        ) as caught,
        memory_for("the graphs", "lower it", torch.device("cpu")),
    ):
        raise error
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: invalid argument"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"),
        ValueError("CUDA error: out of memory"),
    ],
    ids=str,
)
def test_other_errors_are_not_treated_as_out_of_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_a_failed_device_does_not_hide_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: torch.device) -> Any:
        raise torch.AcceleratorError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "mem_get_info", fail)
    with (
        pytest.raises(StartupError, match=r"^Out of memory for the KV pool: lower it\.$"),
        memory_for("the KV pool", "lower it", torch.device("cuda")),
    ):
        no_memory()


@pytest.mark.parametrize(
    ("cache_mb", "chunk", "mebibytes"),
    [(64, 1024, 64 + 32), (8, 1024, 16 + 32), (64, -1, 64 + 128)],
)
def test_vectors_of_images_make_the_pool_smaller(cache_mb: int, chunk: int, mebibytes: int) -> None:
    """For the cache or the largest image, and for what a step gathers from them."""
    # 32 KiB for each token: four vectors of 4096 numbers.
    vision = SimpleNamespace(max_tokens=512, num_outputs=4)
    config: Any = SimpleNamespace(
        image_cache_mb=cache_mb, chunked_prefill_size=chunk, context_len=4096, dtype="bfloat16"
    )
    spec: Any = SimpleNamespace(vision=vision, hidden_size=4096)
    left = build.with_images(Budget(GIB, GIB, "1.00 free"), config, spec)
    assert (left.size_bytes, left.available_bytes) == (GIB - mebibytes * 2**20, GIB)
    assert "for vectors of images" in left.arithmetic
    spec.vision = None
    assert build.with_images(left, config, spec) is left


def test_a_pool_of_the_requested_size_leaves_the_states_their_memory() -> None:
    config: Any = SimpleNamespace(max_mamba_cache_size=16, max_running_requests=4)
    spec: Any = SimpleNamespace(state_slot_bytes=lambda *_: GIB // 4)
    context: Any = SimpleNamespace(tp_size=1, dtype=torch.float32)
    budget = Budget(4 * GIB, 10 * GIB, "(10.00 free) x 0.4 = 4.00")
    num_slots, left = build.with_states(config, spec, context, budget)
    assert (num_slots, left.size_bytes, left.available_bytes) == (16, 0, 6 * GIB)
    assert pool(left, max_total_tokens=40_000).num_tokens == 40_000
    with pytest.raises(StartupError, match=r"only 6\.0 GiB are free; lower it\.$"):
        pool(left, max_total_tokens=60_000)
    config.max_mamba_cache_size = 100
    _, left = build.with_states(config, spec, context, budget)
    with pytest.raises(StartupError, match=r"only 0\.0 GiB are free; lower it\.$"):
        pool(left, max_total_tokens=64)


@pytest.fixture
def control_group(tmp_path: Path) -> Path:
    """A container with a limit of 1000 bytes, less than any machine has, of which 900 are used."""
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    return tmp_path


def test_files_in_memory_do_not_count_as_taken(control_group: Path) -> None:
    stat = control_group / "memory.stat"
    assert available_memory_bytes(control_group=control_group) == 100
    stat.write_text("anon 300\nfile 600\nshmem 50\ninactive_file 400\nactive_file 150\n")
    assert available_memory_bytes(control_group=control_group) == 650
    stat.write_text("anon 300\n")
    assert available_memory_bytes(control_group=control_group) == 100
    # The counts are not from the same moment.
    stat.write_text("inactive_file 800\nactive_file 200\n")
    assert available_memory_bytes(control_group=control_group) == 1000


def test_a_control_group_without_a_limit_has_the_machines_memory(control_group: Path) -> None:
    (control_group / "memory.max").write_text("max\n")
    assert available_memory_bytes(control_group=control_group) > 1000


def test_the_log_says_when_another_rank_had_less() -> None:
    budget = Budget(8 * GIB, 20 * GIB, "(20.00 free) x 0.4 = 8.00")
    assert budget.limited(8 * GIB - 100, 19 * GIB) == Budget(
        8 * GIB - 100, 19 * GIB, budget.arithmetic
    )
    assert budget.limited(7 * GIB, 18 * GIB) == Budget(
        7 * GIB,
        18 * GIB,
        "(20.00 free) x 0.4 = 8.00 on this rank; 7.00 on the rank with the least",
    )


def test_swap_counts_if_it_may_be_used() -> None:
    # Other processes may start or end in between.
    around = [available_memory_bytes()]
    with_swap = available_memory_bytes(with_swap=True)
    around.append(available_memory_bytes())
    assert with_swap >= min(around) * 0.9 > 0


@pytest.mark.parametrize(("tp_size", "fits"), [(1, False), (2, True)])
def test_ranks_need_only_their_part(
    tp_size: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_model_config(num_heads=8, num_kv_heads=2, intermediate_size=64)
    numbers = config.num_parameters
    context = BuildContext(dtype=torch.bfloat16, device=torch.device("cuda", 1), tp_size=tp_size)
    seen = []

    def info(device: torch.device) -> tuple[int, int]:
        seen.append(device.index)
        return numbers, 10**12

    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    if fits:
        require_room(config, context)
    else:
        with pytest.raises(StartupError, match="in bfloat16 and cuda:1 has"):
            require_room(config, context)
    assert seen == [1]
