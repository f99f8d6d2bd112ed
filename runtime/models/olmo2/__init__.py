"""The OLMo 2 family: decoders whose norms follow attention and the MLP."""
