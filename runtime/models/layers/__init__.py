"""Layers that families are made of; each owns its weights."""
