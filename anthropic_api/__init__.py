"""Anthropic's Messages API: only its wire; `openai_api` runs the conversations."""
