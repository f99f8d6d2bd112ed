"""The ModernBERT family: `config.json`, weights and encoder."""
