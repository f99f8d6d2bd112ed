"""The Qwen2.5-VL family: Qwen2 with a vision tower."""
