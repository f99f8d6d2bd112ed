"""The Qwen2 family."""
