"""Decoders without a family of their own: built by `transformers`, computed with our kernels."""
