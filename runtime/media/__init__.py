"""Images of prompts: fetched, decoded and scaled in isolation. Front-safe: no torch."""
