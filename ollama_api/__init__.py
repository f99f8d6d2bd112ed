"""Ollama's API: its wire alone; conversations run as those of `openai_api`."""
