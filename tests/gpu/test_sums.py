"""Sums of several GPUs' parts through shared memory are exact, even if one GPU is late."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.gpu import on_gpu

pytestmark = [pytest.mark.multi_gpu, on_gpu]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_sum_is_exact(num_ranks: int) -> None:
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"needs {num_ranks} GPUs")
    command = [sys.executable, "-m", "benchmarks.h200.all_reduce", "--check"]
    done = subprocess.run(
        [*command, "--ranks", str(num_ranks)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
