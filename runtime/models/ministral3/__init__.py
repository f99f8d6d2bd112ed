"""The Ministral 3 family, without images."""
