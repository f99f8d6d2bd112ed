"""Communication between the ranks that compute one model together."""
