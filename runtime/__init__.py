"""The engine: messages, transport, scheduler, cache, model execution.

Importing this package imports nothing else. Some of its files run in the front process, which must
never import torch.
"""
