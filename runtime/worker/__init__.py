"""The worker process: builds scheduler and executor, starts the other ranks, executes commands."""
