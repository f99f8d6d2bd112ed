"""Shared by models that take images: towers, their configuration, positions of images."""
