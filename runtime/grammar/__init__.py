"""Structured output: checks constraints, compiles them, and computes the allowed tokens."""
