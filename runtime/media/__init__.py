"""Images of prompts: fetched, decoded and scaled in a process of their own. No torch."""
