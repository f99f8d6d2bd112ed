"""The line that a coding agent sends first, for a bill: it is not part of a prompt.

Claude Code begins its system prompt with it, as a block of its own, and gateways that speak another
API pass it on as the first line of theirs. Its value changes with every turn, so that nothing
behind it could be found in the prefix cache.
"""

from __future__ import annotations

_BILLING = "x-anthropic-billing-header:"


def without_billing(text: str) -> str:
    """A system text without that line; empty where it is nothing else."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")
