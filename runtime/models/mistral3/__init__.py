"""Mistral Small 3.1 and later, and Ministral 3, as published: the text model without its tower."""
