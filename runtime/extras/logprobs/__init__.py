"""Extra output: log-probabilities of the actual tokens, and of other tokens at their positions."""
