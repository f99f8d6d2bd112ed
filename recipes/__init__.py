"""How things that ship with Headrace were made; not in the wheel.

A regular package, so that no distribution's `recipes` hides it.
"""
