"""The group of ranks that compute one model together."""
