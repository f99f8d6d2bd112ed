"""The interface between scheduler and executor: a step's plan, its result, the runner."""
