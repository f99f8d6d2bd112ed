"""Reads a model folder without torch: configuration, tokenizer files, tensor headers."""
