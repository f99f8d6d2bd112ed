"""Decides what each step computes; `process` puts the worker together."""
