"""Sampling kernels are not compiled after the warm-up, according to Triton's own binder.

No kernel runs: the test records the keys by which Triton would look up compiled kernels. On a GPU
`tests/gpu/test_compiled.py` counts the compiled kernels.py` counts what was compiled.
"""

from __future__ import annotations

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kernels.sampling
from runtime.executor.warmup_steps import warm_up_sampling
from runtime.extras.logprobs import device as logprobs
from tests.support.sampling_steps import sample_in_steps

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from kernels.sampling import triton as triton_sampling

CPU = torch.device("cpu")


@cache
def binder(kernel: JITFunction) -> Any:
    backend = make_backend(GPUTarget("cuda", 90, 32))
    return create_function_from_signature(kernel.signature, kernel.params, backend)


@pytest.fixture
def variants(vocab_size: int, fit: int, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Filled with kernels' names and what their compiled code depends on."""
    found: set[str] = set()

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        parameters, special, others = binder(kernel)(*args, **options)
        kinds = [
            f"{name}={value if kind == 'constexpr' else (kind, by)}"
            for (name, value), (kind, by) in zip(parameters.items(), special, strict=True)
        ]
        found.add(f"{kernel.__name__}: {', '.join(kinds)} {others}")

    monkeypatch.setattr(JITFunction, "run", note)
    penalise = partial(triton_sampling.apply_penalties, count_bytes=4 * vocab_size * fit)
    ours = SimpleNamespace(**{**vars(triton_sampling), "apply_penalties": penalise})
    monkeypatch.setattr(kernels.sampling, "_kernels", lambda device_type: ours)
    return found


# Of a batch of 131 counts of so many rows fit, and so many of a prompt's logits.
@pytest.mark.parametrize(
    ("vocab_size", "fit"), [(2048, 131), (2051, 131), (2051, 66), (2048, 45), (2051, 1)]
)
def test_no_step_needs_a_kernel_that_the_warm_up_did_not(
    vocab_size: int, fit: int, variants: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_LOGITS", vocab_size * fit)
    warm_up_sampling(vocab_size, CPU)
    warmed = set(variants)
    names = {each.split(":")[0] for each in warmed}
    assert len(names) >= 14
    for batch in (1, 2, 3, 16, 131):
        sample_in_steps(batch, vocab_size, CPU)
    assert sorted(variants - warmed) == []
    assert {each.split(":")[0] for each in variants} <= names
