"""The log names the chosen kernels and the reasons."""

from __future__ import annotations

import logging

import pytest

from kernels.linear import LINEAR
from tests.support.engine import InProcessEngine
from tests.support.tiny_models import tiny_model


def line(caplog: pytest.LogCaptureFixture, **options: object) -> str:
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="runtime.executor.kernel_choices"):
        InProcessEngine(tiny_model("llama"), device="cpu", **options)
    (message,) = caplog.messages
    return message


def test_the_log_names_kernels_with_reasons(caplog: pytest.LogCaptureFixture) -> None:
    automatic = line(caplog)
    assert automatic.startswith("Kernels: attention by cpu (the device's kernels over pages); ")
    linear = LINEAR.choose("cpu")
    for op in ("rope", "paged_attention", "linear", "norm", "activation", "sampling", "greedy"):
        assert op in automatic
    assert f"by {linear.name} ({linear.reason})" in automatic
    assert "embedding, greedy, decode_step by reference (nothing else for cpu)" in automatic


def test_the_log_marks_requested_kernels(caplog: pytest.LogCaptureFixture) -> None:
    asked = line(caplog, attention_backend="torch")
    assert asked.startswith("Kernels: attention by torch (asked for); rope, paged_attention by ")
    assert "paged_attention by reference (asked for)" in asked


@pytest.mark.skipif(LINEAR.unavailable("cpu") is not None, reason="no C++ kernels")
def test_the_log_marks_deterministic_kernels(caplog: pytest.LogCaptureFixture) -> None:
    fixed = line(caplog, deterministic=True)
    assert "attention by cpu (batch-invariant)" in fixed
    assert "linear by cpu (fastest of batch-invariant ones measured on an x86 CPU)" in fixed
