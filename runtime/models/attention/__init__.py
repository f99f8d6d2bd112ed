"""Attention back ends: one protocol, and one file for each back end."""
