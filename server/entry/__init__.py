"""The stages of every request before its route: id, log, origin, key, size."""
