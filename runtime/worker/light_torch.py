"""Imports torch without its functions for tensors on the meta device, for a worker."""

from __future__ import annotations

from runtime.grammar.light_import import import_light

# The first module defines hundreds of functions in Python and imports torch's decompositions. This
# is a third of the time of importing torch, and 18 MB. The modules can still be imported later.
META = ("torch._meta_registrations", "torch.distributed._meta_registrations")


def import_torch() -> None:
    """Import torch; operators on meta tensors may be missing until `META` are imported."""
    import_light("torch", *META)
