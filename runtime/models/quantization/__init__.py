"""Quantization methods: a folder each, with one part that needs torch and one that does not."""
