"""Qwen2: Llama with biases on q, k and v; some sizes slide their upper layers' windows.

Every difference is a number or a flag of `ModelConfig`, read in `runtime.checkpoint.families`.
"""

from __future__ import annotations

from runtime.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The decoder and its head."""
