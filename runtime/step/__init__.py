"""The seam between scheduler and executor: a step's plan, its result, and what computes it."""
