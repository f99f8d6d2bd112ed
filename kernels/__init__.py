"""Functions on tensors: one folder per op, a plain-torch reference and one file per implementation.

This package imports nothing and has no version, because `transformers` probes a package of this
name.
"""
