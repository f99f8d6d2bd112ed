"""Helpers that users' documents import from this package."""
