"""Decides what each step computes."""
