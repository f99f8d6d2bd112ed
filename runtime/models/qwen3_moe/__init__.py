"""The Qwen3-MoE family: Qwen3 with experts in place of MLPs."""
