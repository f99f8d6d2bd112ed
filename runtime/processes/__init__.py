"""Starts, watches and restarts the engine's processes; part of the front."""
