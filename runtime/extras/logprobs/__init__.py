"""Log-probabilities of tokens: of the prompt, the output, the most probable and given ids."""
