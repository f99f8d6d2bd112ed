"""The Llama family: the decoder from which the other families differ."""
