"""Weights of 4 or 8 bits in groups of columns: GPTQ, AWQ, compressed-tensors' `pack-quantized`."""
