"""Benchmarks that a user can run: `headrace bench serving | offline | latency | one-batch`.

Everything in this folder runs without torch; what needs it is started as a process of its own.
"""
