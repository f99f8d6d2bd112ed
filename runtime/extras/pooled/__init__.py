"""Extra output: the vector or scores of a text, the only output of an embedding model."""
