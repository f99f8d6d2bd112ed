"""The offline engine: runs the server's worker and detokenizer processes for a Python program."""
