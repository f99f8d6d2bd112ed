"""GGUF files: header, tensor types, names, and the metadata as a `config.json`."""
