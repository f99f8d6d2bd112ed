"""Weights quantized to integers (codes) of 4 or 8 bits; groups of columns share a scale.

The formats are those of GPTQ, AWQ and compressed-tensors (`pack-quantized`).
"""
