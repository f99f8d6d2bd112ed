"""The Qwen3 family: Llama with norms of query and key heads."""
