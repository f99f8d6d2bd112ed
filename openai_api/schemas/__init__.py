"""Wire types: strictly decoded requests, and types of answers."""
