"""The worker process: its parts put together, its ranks, its commands."""
