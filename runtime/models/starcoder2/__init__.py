"""The Starcoder 2 family."""
