"""Model families, one folder each, and the layers that they are made of."""
