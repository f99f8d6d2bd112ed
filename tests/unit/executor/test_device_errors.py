"""Which errors end the worker, and that the isolation of faulty requests does not catch them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.errors import DeviceLost
from runtime.executor.device_errors import losing_device, lost_device
from runtime.executor.model_runner import Computed, PendingStep
from runtime.step.step_plan import StepPlan
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model

STICKY = [
    torch.AcceleratorError(
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously ..."
    ),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: uncorrectable NVLink error detected during the execution"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("cuda graph replay failed: cudaErrorIllegalAddress"),
]
COLLECTIVE = [
    torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:2, remote error"),
    RuntimeError("NCCL error: unhandled cuda error"),
]
HARMLESS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    # One wrong launch: the device itself is checked, and here there is none.
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ValueError("a user wrote: device-side assert triggered"),
    MemoryError(),
]


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_a_sticky_error(error: RuntimeError) -> None:
    lost = lost_device(error)
    assert lost is not None
    assert not lost.by_others
    assert str(lost) == f"{type(error).__name__}: {str(error).splitlines()[0]}"


@pytest.mark.parametrize("error", COLLECTIVE, ids=str)
def test_an_error_of_a_collective_may_come_from_another_rank(error: RuntimeError) -> None:
    lost = lost_device(error)
    assert lost is not None
    assert lost.by_others


@pytest.mark.parametrize("error", HARMLESS, ids=repr)
def test_what_a_device_survives(error: Exception) -> None:
    assert lost_device(error) is None
    with pytest.raises(type(error)), losing_device():
        raise error


def test_a_lost_device_is_not_caught_as_an_exception() -> None:
    assert not issubclass(DeviceLost, Exception)


class _BrokenEvent:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        raise STICKY[1]


def test_an_error_that_appears_while_waiting_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _BrokenEvent)
    plan = StepPlan(
        rows=np.arange(1),
        num_decodes=1,
        start_lens=np.ones(1, dtype=np.int64),
        query_lens=np.ones(1, dtype=np.int64),
        chunk_tokens=np.empty(0, dtype=np.int32),
        samples=np.ones(1, dtype=bool),
    )
    pending = PendingStep(plan, Computed(host_tokens=np.array([7])), {}, torch.device("cuda"))
    with pytest.raises(DeviceLost, match="illegal memory access") as caught:
        pending.wait()
    assert caught.value.__cause__ is STICKY[1]


def test_a_step_of_a_real_worker() -> None:
    """Sequences are not tried one by one, and the worker does not go on without the requests."""
    engine = InProcessEngine(tiny_model("llama"))
    engine.generate([5, 6, 7], 3)
    engine.add(10, [1, 2, 3], 20)
    engine.scheduler.step()
    num_tries = 0

    def fail(*_: object) -> None:
        nonlocal num_tries
        num_tries += 1
        raise STICKY[0]

    with engine.computing(fail), pytest.raises(DeviceLost, match="device-side assert"):
        engine.scheduler.step()
    assert num_tries == 1
