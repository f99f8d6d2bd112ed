"""Mistral Small 3.1 and later, and Ministral 3, for text: their image tower is not loaded."""
