"""The SmolLM3 family: Llama without rotation in every fourth layer."""
