"""The Gemma 2 family: decoders whose attention scores and logits are capped."""
