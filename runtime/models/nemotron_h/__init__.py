"""Nemotron-H."""
