"""FlashInfer gives the same tokens as the Triton back end, except for ties of the dtype."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.gpu_numerics import PROMPT_LENGTHS, same_tokens


@pytest.mark.timeout(600)  # Its kernels are compiled when first used.
@pytest.mark.parametrize(
    ("dtype", "graphs"), [("bfloat16", True), ("bfloat16", False), ("float16", False)]
)
def test_tokens_equal_those_of_triton(tmp_path: Path, dtype: str, graphs: bool) -> None:
    """Without graphs it attends for decoding rows too."""
    pytest.importorskip("flashinfer")
    ways = {
        backend: {"attention_backend": backend, "disable_cuda_graph": not graphs, "overlap": True}
        for backend in ("triton", "flashinfer")
    }
    # Many short answers: of six with 40 tokens all but one came to a tie, on an H200, in bf16
    # without graphs, and what stands behind a tie is not compared.
    lengths = PROMPT_LENGTHS * 4
    found = same_tokens("LlamaForCausalLM", tmp_path, ways, dtype, lengths=lengths, num_new=8)
    least = 10 if dtype == "bfloat16" and not graphs else 14
    assert found["flashinfer"] >= least
