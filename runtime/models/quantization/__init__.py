"""Quantization methods: a folder for each, with one part for the front and one for the device."""
