"""Developer tools of this repository, run by `python -m tools.NAME`; they are not in the wheel.

This file makes the folder a regular package. Otherwise a package `tools` of another distribution
would be imported instead.
"""
