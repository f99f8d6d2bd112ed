"""Gemma 3."""
