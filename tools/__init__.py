"""Developer tools for Headrace, which the wheel does not contain: `python -m tools.NAME`.

A regular package, so that another distribution's `tools` does not hide it.
"""
