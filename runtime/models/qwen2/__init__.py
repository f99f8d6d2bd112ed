"""The Qwen2 family: Llama with biases on q, k and v."""
