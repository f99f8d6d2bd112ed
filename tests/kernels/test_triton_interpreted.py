"""The Triton kernels on the CPU: the ops' own tests again, in Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported, so the tests run in a process of their own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# Of the models one without and one with a window, and one with all that norms and activations have:
# the others differ in what Triton never sees.
MODELS = "(qwen3-triton or mistral_window-triton or gemma3-triton) and not invariant"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")
@pytest.mark.parametrize(
    "files",
    # Each of these takes a process with torch and Triton, which costs as much as fifty cases.
    [
        [
            *("test_layer_ops.py", "test_step_ops.py", "triton_linear_cases.py"),
            *("triton_fp8_cases.py", "triton_group_cases.py", "triton_latent_cases.py"),
        ],
        [
            *("triton_coded_experts_cases.py", "triton_eight_bit_experts_cases.py"),
            *("../numerics/test_group_weights.py", "../numerics/test_mxfp4.py"),
            "../numerics/test_fp8.py",
        ],
        [
            *("../numerics/test_models.py", "triton_experts_cases.py", "test_attention.py"),
            *("test_attention_halves.py", "triton_attention_cases.py", "triton_kv_cases.py"),
        ],
        [
            *("triton_sampling_cases.py", "triton_gated_cases.py", "test_lora.py"),
            *("test_causal_conv.py", "test_gated_delta.py", "test_mamba2.py"),
            "test_page_copy.py",
        ],
        ["triton_invariant_linear_cases.py", "triton_invariant_attention_cases.py"],
    ],
    ids=lambda files: files[0],
)
def test_in_the_interpreter(files, request):
    paths = [f"tests/kernels/{name}" for name in files]
    # Threads are the CPU kernels' matter; groups of heads are seen with several of keys.
    others = "not test_thread_counts and not test_groups[1-"
    wanted = f"triton and {others} and (not test_models or ({MODELS}))"
    command = [sys.executable, "-m", "pytest", "-q", "-k", wanted, *paths]
    plugins = ["no:cacheprovider", "tests.support.interpreted_triton"]
    if "invariant" in files[0]:
        plugins.append("tests.support.ordered_triton")
    for plugin in plugins:
        command += ["-p", plugin]
    if request.config.getoption("long"):
        command.append("--long")
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
