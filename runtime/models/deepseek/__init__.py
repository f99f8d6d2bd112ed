"""DeepSeek V2 and V3, and models of their form such as Kimi K2."""
