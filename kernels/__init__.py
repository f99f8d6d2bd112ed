"""Functions on tensors ("ops"): a folder per op, with a plain-torch reference and faster variants.

This package imports nothing and has no version, because `transformers` looks for a package of this
name and reads its version.
"""
