"""The executor: runs the scheduler's steps (batch, model, sampling) and owns the device memory."""
