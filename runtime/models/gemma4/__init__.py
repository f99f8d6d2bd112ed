"""Gemma 4, text: layers of two head sizes, shared keys, embeddings for each layer, mixtures."""
