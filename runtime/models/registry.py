"""Which class runs which architecture. Front-safe: strings only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runtime.config.registry import Registry

if TYPE_CHECKING:
    from runtime.models.causal_lm import CausalLM

MODELS: Registry[type[CausalLM]] = Registry(
    "architecture",
    {
        "LlamaForCausalLM": "runtime.models.llama:LlamaForCausalLM",
        "MistralForCausalLM": "runtime.models.mistral:MistralForCausalLM",
        "Qwen2ForCausalLM": "runtime.models.qwen2:Qwen2ForCausalLM",
        "Qwen3ForCausalLM": "runtime.models.qwen3:Qwen3ForCausalLM",
    },
)
