"""GGUF: each matrix is stored in blocks of a type of its own, such as Q4_K."""
