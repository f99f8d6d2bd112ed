"""GGUF: each matrix is stored in blocks of its own type."""
