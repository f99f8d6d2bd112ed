"""Starcoder 2."""
