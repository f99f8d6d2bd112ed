"""The wire format of Ollama's API; `openai_api` runs the conversations."""
