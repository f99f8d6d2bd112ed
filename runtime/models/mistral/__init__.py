"""The Mistral family."""
