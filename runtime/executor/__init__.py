"""Runs the scheduler's steps: batches, the model, sampling; owns device memory."""
