"""The Gemma 3 family without images, and EmbeddingGemma."""
