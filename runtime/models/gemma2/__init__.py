"""The Gemma 2 family."""
