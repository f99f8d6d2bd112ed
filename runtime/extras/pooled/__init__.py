"""The vector of a text, which is the only output of an embedding model."""
