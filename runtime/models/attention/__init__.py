"""Attention back ends: one protocol, one file each."""
