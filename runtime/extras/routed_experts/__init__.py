"""Extra output: the experts of a mixture-of-experts model that computed each token."""
