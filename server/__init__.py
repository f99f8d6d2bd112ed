"""The HTTP server: its launch, its routes, health, metrics and shutdown."""
