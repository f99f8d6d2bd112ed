"""Matrices in 8-bit codes (E4M3 or int8) with scales, and activations rounded to such codes."""
