"""The ModernBERT family: encoders with rotary embeddings and windows."""
