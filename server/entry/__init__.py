"""What every request passes on the way to its route: id, log, origin, key, size."""
