"""Requests: sampling parameters and their checks. Front-safe."""
