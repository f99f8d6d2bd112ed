"""Turns options into a running engine, without HTTP and torch."""
