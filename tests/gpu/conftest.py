"""Tests of what runs on an NVIDIA GPU: `python3 -m pytest tests/gpu` on a machine with one, or two.

On other machines they are skipped, except those marked `also_cpu`. These run with recorded
operations in place of CUDA graphs (`tests/support/graphs.py`). Those for which a CPU test shows the
same run only if `HEADRACE_TEST_DEVICE=cpu` is set.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import gpu
from tests.support.gpu import ASKED, DEVICE
from tests.support.graphs import record_graphs_on_the_cpu

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(HERE):
            continue
        item.add_marker(pytest.mark.gpu)
        reason = _why_not(item)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_not(item: pytest.Item) -> str:
    if DEVICE != "cpu":
        wanted = 2 if item.get_closest_marker("multi_gpu") else 1
        found = torch.cuda.device_count()
        return "" if found >= wanted else f"needs {wanted} CUDA devices, {found} are visible"
    form = item.get_closest_marker("also_cpu")
    if form is None:
        return "no CUDA device"
    if form.kwargs.get("asked") and ASKED is None:
        return "no CUDA device; HEADRACE_TEST_DEVICE=cpu runs its CPU form"
    return ""


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Iterator[None]:
    """An engine that took all of the device does not keep it from the next test's."""
    yield
    if DEVICE != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(scope="module")
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """What `small_engine` computes in: float32, or one of `PRECISIONS`, which see."""
    name = getattr(request, "param", "float32")
    with pytest.MonkeyPatch.context() as patch:
        for option, value in gpu.PRECISIONS[name].items():
            patch.setitem(gpu.OPTIONS, option, value)
        yield name


@pytest.fixture(scope="module")
def graphs(precision: str) -> Iterator[None]:
    """Engines of this process have graphs, of one kind or the other."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE == "cpu":
            record_graphs_on_the_cpu(patch)
        yield
