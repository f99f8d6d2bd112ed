"""How things that ship with Headrace were made; not in the wheel.

A regular package, so that another distribution's `recipes` does not hide it.
"""
