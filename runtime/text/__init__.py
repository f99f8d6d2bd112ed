"""Text from tokens and tokens from text: tokenizer, detokenizer, stops. Front-safe."""
