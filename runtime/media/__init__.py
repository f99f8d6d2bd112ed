"""Images of prompts: the front process fetches them, another process decodes and scales them."""
