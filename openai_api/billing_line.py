"""The billing line that a coding agent sends first: it is not part of the prompt.

Claude Code begins its system prompt with it, as a separate block. Gateways that speak another API
pass it on as the first line of their system prompt. Its value changes with every turn, so nothing
after it could be found in the prefix cache.
"""

from __future__ import annotations

_BILLING = "x-anthropic-billing-header:"


def without_billing(text: str) -> str:
    """A system text without that line; empty where the text is only that line."""
    if not text.startswith(_BILLING):
        return text
    return text.partition("\n")[2].lstrip("\n")
