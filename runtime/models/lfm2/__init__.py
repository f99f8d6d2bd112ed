"""LFM2: short convolutions, and attention in some layers."""
