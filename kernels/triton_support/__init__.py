"""Shared code of the `triton` implementations: availability, and the device's properties."""
