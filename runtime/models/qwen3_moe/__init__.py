"""The Qwen3-MoE family."""
