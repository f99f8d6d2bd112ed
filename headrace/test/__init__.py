"""Helpers that users' documents import by this package's name."""
