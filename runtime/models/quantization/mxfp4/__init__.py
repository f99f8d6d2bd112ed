"""Experts in MXFP4, as in gpt-oss: 4-bit floats whose groups of 32 share a power of two."""
