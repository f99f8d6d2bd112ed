"""Extra output: the entropy of the model's distribution at each generated token."""
