"""The offline engine: the server's worker and detokenizer, driven from a Python process."""
