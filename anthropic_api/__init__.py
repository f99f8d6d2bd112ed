"""The wire format of Anthropic's Messages API; `openai_api` runs the conversations."""
