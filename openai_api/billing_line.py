"""Removes the billing line that Claude Code puts at the start of its system prompt.

It is a separate block of the system prompt. Gateways that speak another API pass it on as the first
line of their system prompt. Its value changes with every request, so no text after it could be
found in the prefix cache.
"""

from __future__ import annotations

_BILLING = "x-anthropic-billing-header:"


def without_billing(text: str) -> str:
    """Return a system text without its billing line; empty if it is nothing else."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")
