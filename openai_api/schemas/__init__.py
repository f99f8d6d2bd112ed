"""Wire types: what a request may hold, decoded strictly, and constants of what we answer."""
