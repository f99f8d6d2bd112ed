"""Extra output: log-probabilities of prompt and output tokens, and of other tokens at each."""
