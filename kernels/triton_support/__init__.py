"""What the `triton` implementations share: whether they can run, and the device's numbers."""
