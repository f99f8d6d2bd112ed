"""Mistral: Llama with a sliding window in its first versions.

Every difference is a number or a flag of `ModelConfig`, read in `runtime.checkpoint.families`.
"""

from __future__ import annotations

from runtime.models.llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """The decoder and its head."""
