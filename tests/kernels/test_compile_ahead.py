"""Kernels are compiled on threads before their first launch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kernels.triton_support.compile_ahead import compiling_ahead
from tests.support.uninterpreted import run_uninterpreted

pytest.importorskip("triton")


def test_a_launch_only_requests_its_kernel(tmp_path: Path) -> None:
    run_uninterpreted("-m", "tests.support.compiled_ahead", str(tmp_path), timeout=120)


def test_a_triton_without_threads_launches_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.runtime._async_compile", None)
    with compiling_ahead() as requests:
        assert requests is None
