"""The OLMoE family: decoders whose norms follow attention and the MLP."""
