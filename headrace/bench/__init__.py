"""Benchmarks that a user can run: `headrace bench serving | offline | latency | one-batch`.

Everything in this folder runs without torch except `one_batch_worker`, which is a separate process.
"""
