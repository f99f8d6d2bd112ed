"""Endpoints: one file each, one line in `openai_api.routes`."""
