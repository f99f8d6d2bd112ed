"""GGUF files: header, tensor types, names, and the `config.json` that the metadata amounts to."""
