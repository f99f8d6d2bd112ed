"""The interface between scheduler and executor: a step's plan, its launch, and its result.

A step is one forward pass of the model for a batch of sequences.
"""
