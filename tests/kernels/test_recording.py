"""Recorded computations: they repeat what Python computed, and refuse what they cannot repeat."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.activation import act_and_mul
from kernels.cpu.library import library, unavailable
from kernels.linear import pack
from kernels.norm import fused_add_rms_norm

pytestmark = pytest.mark.skipif(unavailable() is not None, reason="no C++ library")

SIZE = 32


class Layers:
    """A residual stream through three equal layers, with operators of torch among the kernels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(3, SIZE, generator=generator)
        self.norm = torch.rand(SIZE, generator=generator)
        self.up = pack(torch.randn(2 * SIZE, SIZE, generator=generator), None, "cpu")
        self.down = pack(torch.randn(SIZE, SIZE, generator=generator), None, "cpu")

    def compute(self) -> Tensor:
        hidden, residual = self.x * 0.5, self.x.clone()
        for index in range(3):
            both = self.up(fused_add_rms_norm(hidden, residual, self.norm, 1e-5))
            # The view outlives the name of the tensor that it views.
            both = both.view(3, 2, SIZE).flip(1).view(3, 2 * SIZE)
            hidden = self.down(act_and_mul(both, "silu"))
            hidden[:, ::2].mul_(index + 1)
        return hidden + residual


def _record(compute: Callable[[], Tensor]) -> tuple[Tensor, Any, str]:
    # Imported late, because the import needs the library.
    from kernels.cpu.recording import record

    with torch.inference_mode():
        return record(compute)


def test_what_may_be_a_view_but_is_a_copy_is_computed_again() -> None:
    x = torch.randn(4, 6)

    def compute() -> Tensor:
        return x.to(torch.bfloat16) + x.t().reshape(4, 6) + x.view(2, 12).reshape(4, 6)

    _, recording, why = _record(compute)
    assert recording is not None, why
    with torch.inference_mode():
        x.mul_(3.0)
        recording.repeat()
        assert torch.equal(recording.result, compute())


def test_a_recording_computes_the_same_bits_from_new_inputs() -> None:
    layers = Layers()
    first, recording, why = _record(layers.compute)
    assert recording is not None, why
    first = first.clone()
    assert torch.equal(first, layers.compute())
    with torch.inference_mode():
        for scale in (-2.0, 3.0):
            layers.x.mul_(scale)
            recording.repeat()
            assert torch.equal(recording.result, layers.compute())
            assert not torch.equal(recording.result, first)


def test_memory_is_used_again() -> None:
    layers = Layers()

    def compute() -> Tensor:
        hidden = layers.x
        for _ in range(50):
            hidden = layers.down(hidden.view(3, SIZE))
        return hidden

    _, recording, _ = _record(compute)
    assert recording.size_bytes <= 3 * layers.x.nbytes


@pytest.mark.parametrize(
    "compute",
    [
        lambda: torch.ones(2) if float(torch.ones(1).sum()) else torch.zeros(2),
        lambda: torch.ones(2).nonzero(),
    ],
)
def test_what_depends_on_values_is_refused(compute: Callable[[], Tensor]) -> None:
    result, recording, why = _record(compute)
    assert recording is None
    assert "depends on the values" in why
    assert len(result) == 2


def test_a_function_without_words_is_refused() -> None:
    layers = Layers()
    _, recording, why = _record(lambda: layers.down.unpack())
    assert recording is None
    assert "hr_linear_unpack" in why


def test_calls_are_watched_only_while_recording() -> None:
    layers = Layers()
    _, recording, _ = _record(layers.compute)
    before = recording.size_bytes
    layers.compute()
    assert recording.size_bytes == before
    assert library().hr_linear.errcheck is None
