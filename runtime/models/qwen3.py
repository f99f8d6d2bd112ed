"""Qwen3: Llama whose query and key heads are normalised before rotation.

Every difference is a number or a flag of `ModelConfig`, read in `runtime.checkpoint.families`.
"""

from __future__ import annotations

from runtime.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """The decoder and its head."""
