"""Turns the server's options into a running engine, without HTTP and without importing torch."""
