"""Tokenizer, detokenizer, stop strings and stop patterns. No torch."""
