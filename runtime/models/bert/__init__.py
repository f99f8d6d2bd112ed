"""The BERT family: `config.json`, weights and encoder."""
