"""The Qwen3-Next family: Gated DeltaNet in most layers, gated attention in the others, experts."""
