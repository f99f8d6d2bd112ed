"""The Responses API, which takes and returns items and stores them for the next turn."""
