"""The Responses API: items in, items out, kept for the next turn."""
