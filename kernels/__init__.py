"""Functions on tensors: one folder per op, a plain-torch reference and one file per implementation.

It imports nothing and has no version: `transformers` probes a package of this name.
"""
