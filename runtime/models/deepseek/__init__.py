"""The DeepSeek families: V2, V3, and models of the same form such as Kimi K2."""
