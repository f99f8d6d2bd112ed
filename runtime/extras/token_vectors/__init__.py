"""Extra output: a vector for each token of a text, for late-interaction retrieval."""
