"""Requests: sampling parameters and their checks. No torch."""
