"""Log-probabilities of tokens: of the prompt, of the output, of the best and of given ids."""
