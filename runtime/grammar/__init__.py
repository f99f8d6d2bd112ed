"""Structured output: checks grammars, compiles them, and computes which tokens they allow next."""
