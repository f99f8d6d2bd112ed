"""Qwen2-MoE."""
