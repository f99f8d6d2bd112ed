"""The engine: messages, transport, scheduler, cache, model execution.

Importing this package imports nothing else: the front process uses its front-safe files and must
never pull torch in.
"""
