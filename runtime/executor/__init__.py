"""Runs the scheduler's steps (batch, model, sampling) and owns device memory."""
