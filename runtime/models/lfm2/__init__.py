"""The LFM2 family: short convolutions, and attention in some layers."""
