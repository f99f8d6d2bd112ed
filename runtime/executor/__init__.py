"""Runs what the scheduler decided: batches, the model, sampling; owns device memory."""
