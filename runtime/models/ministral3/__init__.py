"""The Ministral 3 family without images: Mistral with queries scaled by position."""
