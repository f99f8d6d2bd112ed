"""Starts, watches and restarts the engine's processes; runs in the front process."""
