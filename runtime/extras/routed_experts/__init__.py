"""Which experts each token passed, of a mixture of experts."""
