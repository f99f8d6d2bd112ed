"""Qwen3-Next: Gated DeltaNet in most layers, gated attention in the others, experts."""
