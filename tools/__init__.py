"""Tools for those who work on Headrace; not in the wheel: `python -m tools.NAME`.

A regular package, so that no distribution's `tools` hides it.
"""
