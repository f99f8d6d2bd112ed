"""The kernels that serve, in their dtypes and shapes, against float32 or float64 references."""

from __future__ import annotations

import importlib

import pytest

from benchmarks.h200.kernels import SECTIONS


@pytest.mark.timeout(600)  # Attention is compiled for every dtype and page size.
@pytest.mark.parametrize("section", SECTIONS)
def test_numerics_of_the_kernels(section: str) -> None:
    import torch

    torch.manual_seed(1)
    assert importlib.import_module(f"benchmarks.h200.{section}").check() == []
