"""Removes the billing line that a coding agent sends first from the prompt.

Claude Code begins its system prompt with this line, as a separate block. Gateways that speak
another API pass the line on as the first line of their system prompt. Its value changes with every
turn, so no text after it could be found in the prefix cache.
"""

from __future__ import annotations

_BILLING = "x-anthropic-billing-header:"


def without_billing(text: str) -> str:
    """Return a system text without the billing line; empty if the text is only that line."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")
