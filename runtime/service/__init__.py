"""The meaning of requests, shared by all HTTP APIs and the offline engine; no HTTP, no torch."""
