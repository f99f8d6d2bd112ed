"""Experts in MXFP4, as gpt-oss stores them: floats of 4 bits that share a power of two."""
