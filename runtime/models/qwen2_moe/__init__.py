"""The Qwen2-MoE family."""
