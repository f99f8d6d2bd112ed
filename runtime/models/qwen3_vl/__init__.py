"""The Qwen3-VL family: Qwen3 with a vision tower."""
