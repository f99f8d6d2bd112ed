"""Gemma 3 with images: the decoder and its vision tower."""
