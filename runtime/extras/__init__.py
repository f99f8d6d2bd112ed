"""Outputs besides tokens that requests may ask for.

Each has a folder with a front and a device half.
"""
