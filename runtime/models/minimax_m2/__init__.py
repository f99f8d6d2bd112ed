"""The MiniMax M2 family: M2 and M2.1."""
