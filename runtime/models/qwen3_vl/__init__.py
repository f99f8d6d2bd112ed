"""Qwen3-VL."""
