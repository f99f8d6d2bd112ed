"""The worker process: assembles its parts, starts its ranks, executes commands."""
