"""Ministral 3, without its images."""
