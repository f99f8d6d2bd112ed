"""The scheduler: decides which tokens of which requests each forward pass computes."""
