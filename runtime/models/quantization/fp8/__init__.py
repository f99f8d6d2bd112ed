"""E4M3: matrices in 8-bit floats with scales, and activations rounded to them."""
