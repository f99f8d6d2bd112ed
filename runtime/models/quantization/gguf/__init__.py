"""GGUF: each matrix in blocks of a type of its own."""
