"""The Mistral family: Llama, with a sliding window in the first versions."""
