"""Tool-call parsers: one file each, one line in the registry."""
