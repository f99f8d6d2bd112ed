"""Weights in codes of 4 or 8 bits whose groups of columns share a scale.

The formats are those of GPTQ, AWQ and compressed-tensors (`pack-quantized`).
"""
