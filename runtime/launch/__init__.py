"""From the options that were asked for to a running engine; no HTTP, no torch."""
