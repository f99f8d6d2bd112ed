"""The frontend language: Python programs that append prompts and generations to a state."""
