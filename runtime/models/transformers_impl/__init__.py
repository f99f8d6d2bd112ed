"""Decoders without a family here, built by `transformers` and computed with our kernels."""
