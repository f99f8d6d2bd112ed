"""The Qwen2-MoE family: Qwen2 with experts and a shared expert."""
