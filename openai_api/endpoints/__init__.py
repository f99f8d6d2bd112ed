"""The endpoints. Each has a file in this folder and a line in `openai_api.routes`."""
