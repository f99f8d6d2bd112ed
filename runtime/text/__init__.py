"""Tokenizer, detokenizer, stop strings and stop patterns. Front-safe."""
