"""The SmolLM3 family."""
