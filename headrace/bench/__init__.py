"""Benchmarks that a user can run: `headrace bench serving | offline | latency | one-batch`.

Everything in this folder runs without torch but `one_batch_worker`, a process of its own.
"""
