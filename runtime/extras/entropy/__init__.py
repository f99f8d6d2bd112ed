"""Entropy of what each generated token was drawn from, as the model gives it."""
