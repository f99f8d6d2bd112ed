"""Benchmarks that a user can run: `headrace bench serving | offline | latency | one-batch`.

Only `one_batch_worker`, which is a separate process, imports torch.
"""
