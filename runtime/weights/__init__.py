"""Loads weights from files at the start, and from files or trainers while serving."""
