"""The shared code of the `triton` implementations: availability, launches and device memory."""
