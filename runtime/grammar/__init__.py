"""Structured output: what may be asked for, who compiles it, what a token may be."""
