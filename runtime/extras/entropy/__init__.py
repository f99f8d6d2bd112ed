"""Entropy of the model's distribution at each generated token."""
