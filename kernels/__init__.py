"""Functions on tensors: one folder an op, a plain-torch truth and one file per implementation.

Nothing is imported here and there is no version: `transformers` probes a package of this name.
"""
