"""MiniMax M2 and M2.1."""
