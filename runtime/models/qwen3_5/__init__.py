"""Qwen3.5: hybrid decoders, dense or with experts, for text or also for images."""
