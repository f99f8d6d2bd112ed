"""Gemma 4 for text: two head sizes, keys that layers share, and embeddings for each layer."""
