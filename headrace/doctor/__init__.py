"""`headrace doctor`: what this machine offers and what a model needs, before a server starts."""
