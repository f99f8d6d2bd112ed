"""What every request passes before its route runs: id, log, and checks of origin, key and size."""
