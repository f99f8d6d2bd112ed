"""The HTTP server: launch, arguments, the app, native routes, health, metrics, supervision."""
