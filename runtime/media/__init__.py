"""Images of prompts: fetched, decoded and scaled where that hurts nobody. Front-safe: no torch."""
