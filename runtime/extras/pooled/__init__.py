"""The vector of a text, which is all that an embedding model gives."""
